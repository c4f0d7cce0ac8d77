"""Tests of hf_zero, one file per promise; ranks on CPU come from `tests.support.harness`."""
