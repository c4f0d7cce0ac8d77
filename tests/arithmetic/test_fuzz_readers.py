"""Whatever a file holds, readers give values or an error for people: no other exception, no runaway memory."""

import contextlib
import json
import pickle
import tracemalloc

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_zero import ZeroConfig
from hf_zero.checkpoint import commit
from hf_zero.checkpoint.safetensors_file import SlicedFile
from hf_zero.convert import pickles
from hf_zero.errors import ZeroError
from hf_zero.integrations import plain_values


_MOST = 64 << 20  # bytes that a reader may take for a file of a few thousand
_EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "repeat"]),
        st.integers(0, 1 << 16),
        st.binary(min_size=1, max_size=12),
    ),
    min_size=1,
    max_size=6,
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


def _edited(data, edits):
    """`data` with some bytes changed, cut out, put in or repeated."""
    for kind, position, new in edits:
        at = position % (len(data) + 1)
        if kind == "flip":
            data = data[:at] + new + data[at + len(new) :]
        elif kind == "cut":
            data = data[:at] + data[at + position % 64 + 1 :]
        elif kind == "insert":
            data = data[:at] + new + data[at:]
        else:
            data = data[:at] + data[at : at + 40] * (position % 8 + 1) + data[at:]
    return data


def _safetensors(path):
    file = SlicedFile.open(path)
    for name, (dtype, shape) in file.tensors.items():
        target = torch.empty(min(4, torch.Size(shape).numel()), dtype=dtype)
        file.read(path, [(name, 0, target)])


def _marker(path):
    commit.is_committed(path.parent)
    commit.check_files(path.parent)
    commit.checksums(path.parent)


def _valid_marker(folder):
    safetensors.torch.save_file({"a": torch.ones(3)}, folder / "model.safetensors")
    commit.write_marker(folder, {"model.safetensors": {"a": 1}})
    return (folder / "COMMIT").read_bytes()


def _valid_safetensors(folder):
    return safetensors.torch.save({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)})


def _valid_pickle(folder):
    torch.save({"module": {"a": torch.ones(3)}, "step": 3, "param_shapes": [torch.Size([3])]}, folder / "made.pt")
    return (folder / "made.pt").read_bytes()


def _valid_plain_pickle(folder):
    return pickle.dumps({"a": [1, 2.5, "text"], "b": (None, True)})


def _valid_values(folder):
    plain_values.write(folder / "made.safetensors", {"step": 3, "state": [torch.ones(2), (1, "x")]})
    return (folder / "made.safetensors").read_bytes()


def _valid_yaml(folder):
    return b"offload_optimizer_device: none\ndeepspeed_config:\n  zero_stage: 2\n  gradient_clipping: 1.0\n"


def _valid_json(folder):
    return json.dumps(
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8}, "bf16": {"enabled": True}}
    ).encode()


READERS = {
    "model.safetensors": (_valid_safetensors, _safetensors),
    "COMMIT": (_valid_marker, _marker),
    "states.pt": (_valid_pickle, pickles.load),
    "plain.pkl": (_valid_plain_pickle, pickles.load_plain),
    "values.safetensors": (_valid_values, plain_values.read),
    "zero.yaml": (_valid_yaml, lambda path: ZeroConfig.from_any(str(path))),
    "ds.json": (_valid_json, lambda path: ZeroConfig.from_any(str(path))),
}


def _check(path, read, data):
    path.write_bytes(data)
    outside = set(path.parent.parent.iterdir())
    tracemalloc.start()
    try:
        with contextlib.suppress(ZeroError):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < _MOST
    finally:
        tracemalloc.stop()
    assert set(path.parent.parent.iterdir()) == outside


def _fuzz(name, folder, examples):
    make, read = READERS[name]
    (folder / "inside").mkdir(exist_ok=True)
    path = folder / "inside" / name
    valid = make(path.parent)
    read_back = settings(max_examples=examples, derandomize=True, suppress_health_check=list(HealthCheck))

    @read_back
    @given(_EDITS)
    def edited(edits):
        _check(path, read, _edited(valid, edits))

    @read_back
    @given(_JSON)
    def structured(value):
        text = json.dumps(value).encode()
        framed = len(text).to_bytes(8, "little") + text + b"\0" * 64
        _check(path, read, framed if name.endswith("safetensors") else text)

    edited()
    structured()


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_errors_for_people(tmp_path, name):
    _fuzz(name, tmp_path, 50)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", READERS)
def test_ten_thousand_damaged_files_are_errors_for_people(tmp_path, name):
    _fuzz(name, tmp_path, 5000)


@pytest.mark.parametrize("damaged", [b"]r\0\0\0\x08.", b"\x96\0\0\0\x40\0\0\0\0."], ids=["number", "length"])
def test_pickles_that_ask_for_more_memory_than_they_have_bytes_are_refused(tmp_path, damaged):
    (tmp_path / "plain.pkl").write_bytes(b"\x80\x05" + damaged)
    with pytest.raises(ZeroError, match="cannot be read: "):
        pickles.load_plain(tmp_path / "plain.pkl")
