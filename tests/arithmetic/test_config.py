"""Reading configurations from files, dicts and arguments: places, merging, notes, files that cannot be read."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import yaml

from hf_zero.config import Origin, ZeroConfig
from hf_zero.config.documents import load_document
from hf_zero.config.options import OPTIONS
from hf_zero.errors import ZeroConfigError
from hf_zero.launcher.arguments import config_of_command, parse_command


ROOT = Path(__file__).parents[2]
CONFIGS = Path(__file__).parents[1] / "data/configs"


def _problems(*args, **kwargs):
    with pytest.raises(ZeroConfigError) as caught:
        ZeroConfig.from_any(*args, **kwargs)
    return caught.value.problems


def test_the_config_is_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ZeroConfig().zero_stage = 3
    with pytest.raises(TypeError):
        ZeroConfig(3)


def test_the_error_is_a_value_error_that_counts_its_problems():
    with pytest.raises(ValueError, match="2 problems in the configuration:\n  1. zero_stage is 7") as caught:
        ZeroConfig(zero_stage=7, hysteresis=0)
    assert len(caught.value.problems) == 2
    assert str(ZeroConfigError("one thing")) == "one thing"


@pytest.mark.parametrize(
    "bad",
    [
        {"zero_stage": True},
        {"zero_stage": "3"},
        {"gradient_clipping": "1.0"},
        {"gradient_accumulation_steps": 2.5},
        {"overlap_comm": 1},
        {"reduce_bucket_size": float("inf")},
        {"hang_timeout_s": "120"},
        {"loss_scale": None},
        {"optimizer": "AdamW"},
        {"param_access": None},
    ],
    ids=str,
)
def test_python_values_are_not_guessed(bad):
    """Text becomes numbers in files only; the dataclass itself takes the type or refuses."""
    ((name, _),) = bad.items()
    with pytest.raises(ZeroConfigError, match=f"^{name} is "):
        ZeroConfig(**bad)


def test_whole_floats_are_counts():
    config = ZeroConfig(reduce_bucket_size=5e8, stage3_max_live_parameters=1e9)
    assert (config.reduce_bucket_size, type(config.reduce_bucket_size)) == (500_000_000, int)
    assert config.stage3_max_live_parameters == 10**9


def test_derived_values():
    assert ZeroConfig(zero_stage=3).zero3_init_flag is True
    assert ZeroConfig(zero_stage=2).zero3_init_flag is False
    assert ZeroConfig(zero_stage=2).replace(zero_stage=3).zero3_init_flag is True
    kept = ZeroConfig.from_any({"zero_stage": 3, "zero3_init_flag": False})
    assert kept.replace(zero_stage=3).zero3_init_flag is False


def test_replace_checks_and_records():
    config = ZeroConfig().replace(origin=Origin(label="here"), hysteresis=3)
    assert (config.hysteresis, config.where("hysteresis"), config.where("zero_stage")) == (3, "here", "default")
    with pytest.raises(ZeroConfigError, match=r"hysteresis is 0 \(the keyword arguments\)"):
        config.replace(hysteresis=0)
    with pytest.raises(ZeroConfigError, match="no field 'histeresis'"):
        config.replace(histeresis=0)


def test_sizes_in_elements():
    config = ZeroConfig(reduce_bucket_size="25MB", allgather_bucket_size="1MiB", stage3_prefetch_bucket_size="auto")
    assert config.elements("reduce_bucket_size", 4) == 6_250_000
    assert config.elements("allgather_bucket_size", 2) == 2**19
    assert config.elements("stage3_prefetch_bucket_size", 2) == 1
    assert config.elements("stage3_param_persistence_threshold", 2) == 0
    assert ZeroConfig(reduce_bucket_size="1B").elements("reduce_bucket_size", 4) == 1


def test_a_unit_that_is_none_is_an_error():
    with pytest.raises(ZeroConfigError, match="reduce_bucket_size is '5 ib': expected"):
        ZeroConfig.from_any({"reduce_bucket_size": "5 ib"})


def test_every_field_is_declared_as_an_option():
    fields = {field.name for field in dataclasses.fields(ZeroConfig)}
    assert fields - set(OPTIONS) == {"origins", "notes"}
    assert all(option.help for option in OPTIONS.values())
    for name, option in OPTIONS.items():
        assert ZeroConfig.default(name) is None or option.kind.problem(ZeroConfig.default(name)) is None, name


# --- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["ddp", "zero1", "zero2", "zero3"])
def test_recipes_read_without_notes_and_keep_to_accelerates_keys(recipe):
    from accelerate.commands.config.config_args import load_config_from_file

    file = ROOT / f"recipes/accelerate_configs/{recipe}.yaml"
    config = ZeroConfig.from_any(file)
    assert config.zero_stage == {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}[recipe]
    assert config.notes == ()
    stock = load_config_from_file(str(file))
    assert stock.num_processes == 8
    assert stock.main_process_port == 0


def test_lines_of_a_json_with_tabs():
    file = CONFIGS / "zero3_auto.json"
    config = ZeroConfig.from_any(file)
    text = file.read_text().splitlines()
    assert '"stage"' in text[config.origins["zero_stage"].line - 1]
    assert '"steps_per_print"' in text[config.origins["steps_per_print"].line - 1]
    assert config.where("zero_stage") == f"{file}:5"
    assert config.origins["zero_stage"].written == "zero_optimization.stage"


def test_a_yaml_finds_its_json_beside_itself_and_in_the_current_folder(monkeypatch, tmp_path):
    file = CONFIGS / "json_zero3.yaml"
    assert ZeroConfig.from_any(file).where("zero_stage") == f"{CONFIGS / 'zero3_auto.json'}:5"
    (tmp_path / "zero3_auto.json").write_text('{"zero_optimization": {"stage": 1}}')
    monkeypatch.chdir(tmp_path)  # Accelerate looks here first
    assert ZeroConfig.from_any(file).zero_stage == 1


def _pair(tmp_path, section, content):
    (tmp_path / "ds.json").write_text(content)
    file = tmp_path / "a.yaml"
    lines = [f"  {key}: {value}" for key, value in section.items()]
    file.write_text(
        "\n".join(["distributed_type: DEEPSPEED", "deepspeed_config:", "  deepspeed_config_file: ds.json", *lines])
    )
    return file


def test_yaml_and_json_must_agree_and_a_number_beats_auto(tmp_path):
    content = '{"zero_optimization": {"stage": 2},\n "gradient_accumulation_steps": "4"}'
    file = _pair(tmp_path, {"zero_stage": 2, "gradient_accumulation_steps": 4}, content)
    assert ZeroConfig.from_any(file).gradient_accumulation_steps == 4
    file = _pair(tmp_path, {"gradient_accumulation_steps": "auto"}, content)
    assert ZeroConfig.from_any(file).where("gradient_accumulation_steps") == f"{tmp_path / 'ds.json'}:2"
    file = _pair(tmp_path, {"gradient_accumulation_steps": 8}, content.replace('"4"', '"auto"'))
    assert ZeroConfig.from_any(file).where("gradient_accumulation_steps") == f"{file}:4"
    file = _pair(tmp_path, {"zero_stage": 3, "gradient_accumulation_steps": 8}, content)
    assert _problems(file) == (
        f"zero_stage differs: {file}:4 says 3, {tmp_path / 'ds.json'}:1 says 2: remove it from one of the two",
        f"gradient_accumulation_steps differs: {file}:5 says 8, {tmp_path / 'ds.json'}:2 says 4: remove it from one "
        "of the two",
    )


def test_a_json_without_a_stage_leaves_the_yamls_stage(tmp_path):
    file = _pair(tmp_path, {"zero_stage": 3}, '{"gradient_clipping": 0.5}')
    config = ZeroConfig.from_any(file)
    assert (config.zero_stage, config.gradient_clipping, config.notes) == (3, 0.5, ())


def test_problems_of_the_json_name_the_way_to_it(tmp_path):
    file = _pair(tmp_path, {}, '{"zero_optimization": {"stage": 9, "overlap_com": true}}')
    assert len(_problems(file)) == 2
    file = _pair(tmp_path, {}, "{,}")
    (problem,) = _problems(file)
    assert problem.startswith(f"{file}:3: deepspeed_config_file: {tmp_path / 'ds.json'}:1: not valid JSON")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", '{"a": 1,}', ":1: not valid JSON"),
        (
            "a.json",
            '{\n  // stage\n  "a": 1}',
            ":2: not valid JSON: Expecting property name enclosed in double quotes",
        ),
        ("a.json", '{\n  "a": 1, # stage\n}', "JSON"),
        ("a.json", "", ":1: not valid JSON"),
        ("a.json", "[1]", "expected keys and values, but the file is a list"),
        ("a.yaml", "a: [1", ": not valid YAML"),
        ("a.yaml", "", "the file is empty"),
        ("a.yaml", "just text", "the file is a str"),
        (
            "a.json",
            '{"zero_optimization": {"stage": 2,\n "stage": 3}}',
            ":2: zero_optimization.stage stands here and on line 1",
        ),
        ("a.yaml", b"\xff\xfe\x00", "is not a text file"),
        ("a.yaml", "1: 2\n", "unknown key '1'"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, content, words):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    (problem,) = _problems(file)
    assert problem.startswith(str(file))
    assert words in problem


def test_the_last_of_two_yaml_keys_counts_as_it_does_for_accelerate(tmp_path):
    file = tmp_path / "a.yaml"
    section = "deepspeed_config:\n  zero_stage: {}\n  overlap_comm: false\n"
    file.write_text("debug: false\n" + section.format(1) + section.format(3) + "debug: false\n")
    config = ZeroConfig.from_any(file)
    assert (config.zero_stage, config.where("zero_stage")) == (3, f"{file}:6")
    assert config.notes == (
        f"{file}:5: deepspeed_config stands here and on line 2: the last one counts, as it does for Accelerate",
        f"{file}:8: debug stands here and on line 1: the last one counts, as it does for Accelerate",
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            '{"zero_optimization": {"stage": 3}\n',
            ":1: not valid JSON: Expecting ',' delimiter (the file ends",
        ),
        ('{\n "zero_optimization": {\n  "stage": 3\n\n\n', ":5: not valid JSON: "),
        ("\n\n", ":2: not valid JSON: "),
    ],
)
def test_a_json_that_ends_too_early(tmp_path, content, words):
    file = tmp_path / "a.json"
    file.write_text(content)
    (problem,) = _problems(file)
    assert problem.startswith(str(file) + words) and problem.endswith("is a closing brace missing?)"), problem


def test_keys_of_a_json_that_stand_for_comments_are_left_out(tmp_path):
    file = tmp_path / "a.json"
    file.write_text(
        '{"_comment": "all", "//": 1, "//stage": 9, "zero_optimization": {"_why": [1], "stage": 3},\n'
        ' "optimizer": {"type": "SGD", "_": 0, "params": {"lr": 0.1}}, "_comment2": {"zero_stage": 1}}'
    )
    config = ZeroConfig.from_any(file)
    assert (config.zero_stage, config.optimizer) == (3, {"type": "SGD", "params": {"lr": 0.1}})
    assert config.notes == ()
    assert ZeroConfig.from_any(json.loads(file.read_text())) == config
    yaml_file = tmp_path / "a.yaml"
    yaml_file.write_text("zero_stage: 3\n_comment: all\n")  # Accelerate refuses it, too
    assert "unknown key '_comment'" in _problems(yaml_file)[0]


def test_what_deepspeed_knows_and_needs_nothing_here_is_noted_and_misspelt_keys_are_not():
    sections = {"comms_config": {"verbose": False}, "timers": {}, "datastates_ckpt": {"host_cache_size": 16}}
    config = ZeroConfig.from_any({"zero_optimization": {"stage": 3}, **sections, "disable_allgather": False})
    assert [note.split(" ")[3] for note in config.notes] == list(sections), config.notes
    (problem,) = _problems({"zero_optimization": {"stage": 3}, "comms_confg": {}})
    assert problem.endswith("unknown key 'comms_confg'; did you mean 'comms_config'?")


def test_sequence_parallelism_is_asked_for_in_every_format(tmp_path):
    source = {"zero_optimization": {"stage": 3}, "sequence_parallel_size": 2}
    assert ZeroConfig.from_any(source).sp_size == 2
    yaml_file = tmp_path / "a.yaml"
    yaml_file.write_text(
        "distributed_type: DEEPSPEED\nparallelism_config:\n  parallelism_config_sp_size: 4\n"
        "  parallelism_config_sp_backend: deepspeed\n  parallelism_config_cp_size: 1\n"
    )
    config = ZeroConfig.from_any(yaml_file)
    assert (config.sp_size, config.cp_size, config.where("sp_size")) == (4, 1, f"{yaml_file}:3")
    assert any("needs no DeepSpeed" in note for note in config.notes), config.notes
    args = parse_command(["--parallelism_config_sp_size", "2", "--zero_stage", "3", "script.py"])
    assert config_of_command(args).sp_size == 2
    (problem,) = _problems({"sp_size": 2, "cp_size": 2})
    assert "not available together" in problem


def test_json_comments_get_a_hint(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('{\n  "train_batch_size": 8 // all ranks\n}')
    (problem,) = _problems(file)
    assert problem.startswith(f"{file}:2: ") and "JSON has no comments" in problem


def test_paths_that_lead_nowhere(tmp_path):
    assert _problems(tmp_path / "none.yaml") == (
        f"{tmp_path / 'none.yaml'}: there is no such file (current folder: {os.getcwd()})",
    )
    assert _problems(tmp_path)[0].endswith("is a folder; name the JSON or YAML file in it")


@pytest.mark.parametrize("source", [3, ["a.yaml"], object()], ids=["int", "list", "object"])
def test_sources_that_are_none(source):
    assert _problems(source)[0].startswith("cannot read a configuration from ")


def test_keys_must_be_text():
    assert _problems({3: 1}) == ("the configuration dict: keys must be text, got 3",)


def test_offload_to_disk_needs_a_folder_that_can_be_written(tmp_path):
    source = {"zero_stage": 3, "offload_param_device": "nvme", "offload_param_nvme_path": str(tmp_path)}
    assert ZeroConfig.from_any(source).offload_param_nvme_path == str(tmp_path)
    if os.geteuid() != 0:  # root may write everywhere
        tmp_path.chmod(0o500)
        assert any("cannot be written to" in problem for problem in _problems(source))


# --- other sources -----------------------------------------------------------------------------------------------


def test_arguments_win_over_a_file_and_none_means_not_given():
    file = CONFIGS / "tutorial_zero2.yaml"
    config = ZeroConfig.from_any(file, zero_stage=1, gradient_accumulation_steps="8", overlap_comm=None)
    assert (config.zero_stage, config.gradient_accumulation_steps, config.overlap_comm) == (1, 8, True)
    assert (config.where("zero_stage"), config.where("overlap_comm")) == ("the keyword arguments", f"{file}:10")
    assert _problems(file, zero_stag=1) == (
        "the keyword arguments: unknown key 'zero_stag'; did you mean 'zero_stage'?",
    )


def test_a_config_passes_through_unchanged():
    config = ZeroConfig.from_any(CONFIGS / "tutorial_zero2.yaml")
    again = ZeroConfig.from_any(config)
    assert again == config
    assert (again.origins, again.notes) == (config.origins, config.notes)
    assert ZeroConfig.from_any(config, zero_stage=3).gradient_clipping == 1.0
    assert ZeroConfig.from_any(ZeroConfig(zero_stage=3), hysteresis=4) == ZeroConfig(zero_stage=3, hysteresis=4)


def test_notes_follow_the_config_to_the_ranks():
    config = ZeroConfig.from_any({"zero_optimization": {"stage": 2, "contiguous_gradients": False}})
    assert len(config.notes) == 1
    copy = ZeroConfig.from_json(config.to_json())
    assert (copy, copy.notes, copy.origins) == (config, config.notes, config.origins)
    assert "\n" not in config.to_json()


def test_a_flat_yaml_has_lines(tmp_path):
    file = tmp_path / "flat.yaml"
    file.write_text("zero_stage: 3\nparam_access: raise\n")
    config = ZeroConfig.from_any(file)
    assert (config.param_access, config.where("param_access")) == ("raise", f"{file}:2")


def test_accelerates_json_form_is_read_like_its_yaml(tmp_path):
    file = tmp_path / "default_config.json"
    content = yaml.safe_load((CONFIGS / "trl_zero3.yaml").read_text())
    file.write_text(json.dumps(content))
    assert ZeroConfig.from_any(file) == ZeroConfig.from_any(CONFIGS / "trl_zero3.yaml")
    assert load_document(file).data == content
