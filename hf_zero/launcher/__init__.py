"""The launcher: starts ranks, and carries the configuration to them and finds it there.

It imports nothing: every process that imports torch imports `hook` from here.
"""
