"""`hf-zero doctor`: its findings, its exit status and its self-test."""

import functools
import json
import os
import re
from types import SimpleNamespace

import pytest

from hf_zero import cli
from hf_zero.core.direct_file import DirectFile
from hf_zero.errors import ZeroRuntimeError
from hf_zero.tools import disk_speed, doctor


def run(capsys, *words):
    status = cli.main(["doctor", *map(str, words)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.slow
def test_a_sound_machine_passes(capsys, tmp_path):
    status, out, _ = run(capsys, "--num_processes", 2, "--folder", tmp_path, "--timeout", 300, "--json")
    findings = {finding["what"]: finding for finding in json.loads(out)}
    assert status == 0, findings
    assert findings["collectives"]["text"].startswith("2 ranks: right values"), findings["collectives"]
    for what in ("python", "torch", "transformers", "accelerate", "host", "backends", "ulimit -l", "ports", "disk"):
        assert findings[what]["text"], what


def test_the_table(capsys, tmp_path):
    status, out, _ = run(capsys, "--num-processes", 0, "--folder", tmp_path)
    assert status == 0
    assert "collectives" not in out and f"{tmp_path}" in out.replace("\n", "")


def test_a_fault_is_the_exit_status(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(
        doctor.metadata, "requires", lambda name: ["torch>=99", "no-such-package>=1", "trl ; extra == 'trl'"]
    )
    status, out, _ = run(capsys, "--num_processes", 0, "--folder", tmp_path, "--json")
    found = {finding["what"]: finding for finding in json.loads(out)}
    assert status == 1
    assert found["torch"]["level"] == "fail" and "is outside >=99" in found["torch"]["text"]
    assert found["no-such-package"]["text"].startswith("is not installed")


@pytest.mark.slow
def test_a_rank_that_fails_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    (finding,) = doctor.collectives(2, 300)
    assert finding.level == "fail" and re.match(r"rank [01] of 2: .*no-such-interface", finding.text), finding


@pytest.mark.parametrize(
    ("load", "words"), [(7.5, "the machine is busy (load average 7.5 on 4 cores)"), (0.1, "may not reach each other")]
)
def test_ranks_that_hang_are_ended_with_advice(load, words, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 4)
    status, out, _ = run(capsys, "--folder", tmp_path, "--timeout", 0.01, "--json")
    finding = next(finding for finding in json.loads(out) if finding["what"] == "collectives")
    assert (status, finding["level"]) == (1, "fail")
    assert finding["text"].startswith("2 of 2 ranks did not finish within 0.01 s"), finding
    assert words in finding["text"] and finding["text"].endswith("--timeout"), finding


def test_direct_writes_are_tried(tmp_path, monkeypatch):
    kinds = {finding.what: finding.level for finding in doctor.disk(tmp_path)}
    assert kinds["disk"] == "ok" and kinds["O_DIRECT"] in ("ok", "note")
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(22, "Invalid argument")))
    found = {finding.what: finding for finding in doctor.disk(tmp_path)}
    assert found["O_DIRECT"].level == "note" and "refused" in found["O_DIRECT"].text


def test_the_disk_of_offloaded_state_is_measured(monkeypatch, capsys, tmp_path):
    nbytes = 5 << 20
    monkeypatch.setattr(disk_speed, "measure", functools.partial(_measure_little, nbytes, disk_speed.measure))
    status, out, _ = run(capsys, "--num-processes", 0, "--folder", tmp_path, "--disk", tmp_path, "--json")
    found = {finding["what"]: finding["text"] for finding in json.loads(out)}
    assert status == 0
    rates = [float(found[what].split()[0]) for what in ("read", "write", "both at once")]
    assert all(rate > 0 for rate in rates), found
    seconds = float(found["step"].split()[2])
    assert seconds == pytest.approx(24 / rates[2], rel=0.1), found
    assert not list(tmp_path.iterdir())


def _measure_little(nbytes, measure, folder, _):
    return measure(folder, nbytes)


def test_a_disk_without_room_is_a_fault(monkeypatch, tmp_path):
    def full(self, nbytes):
        raise ZeroRuntimeError("no room")

    monkeypatch.setattr(DirectFile, "allocate", full)
    assert [finding.text for finding in doctor.disk_speed(tmp_path) if finding.level == "fail"] == ["no room"]


@pytest.mark.parametrize(("kind", "words"), [("tmpfs", "is memory"), ("nfs4", "over the network")])
def test_folders_that_are_no_local_disk_are_noted(monkeypatch, tmp_path, kind, words):
    monkeypatch.setattr(doctor, "_file_system", lambda folder: kind)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 20))
    notes = [finding.text for finding in doctor.disk_speed(tmp_path) if finding.level == "note"]
    assert any(f"{kind} " in note and words in note for note in notes), notes


def test_bad_input(capsys, tmp_path):
    for option in ("--folder", "--disk"):
        status, _, err = run(capsys, option, tmp_path / "none")
        assert status == 2 and len(err.splitlines()) == 1 and option in err, err
