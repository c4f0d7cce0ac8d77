"""What is uploaded is the whole consolidated folder, and one rank uploads it."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
import transformers
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError
from transformers import LlamaForCausalLM

import hf_zero
from hf_zero.checkpoint import commit
from hf_zero.errors import ZeroCheckpointError
from tests.ranks.test_checkpoint import trainer_for
from tests.ranks.test_saving import check_same_folder, twin_of
from tests.support import zoo
from tests.support.harness import distributed, run_ranks


class _Done:
    """An upload in the background that is over at once."""

    def done(self):
        return True

    def result(self):
        return None


class Hub:
    """Stands for the Hub: keeps every upload as a folder, on the rank that made it."""

    def __init__(self, monkeypatch, folder):
        self.folder, self.uploads, self.repos = Path(folder) / f"hub{dist.get_rank()}", [], []
        monkeypatch.setattr(HfApi, "create_repo", self.create_repo)
        monkeypatch.setattr(HfApi, "create_commit", self.create_commit)
        monkeypatch.setattr(HfApi, "upload_folder", self.upload_folder)
        for module in (transformers.utils.hub, transformers.trainer):  # earlier releases have bound them by name
            for name in ("create_repo", "create_commit", "upload_folder"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, getattr(self, name))
        monkeypatch.setattr(ModelCard, "load", self.load_card)
        monkeypatch.setattr(ModelCard, "validate", lambda card, **options: None)  # earlier releases ask the Hub

    def load_card(self, *args, **kwargs):
        raise EntryNotFoundError

    def create_repo(self, name, **options):
        self.repos.append((name, options))
        return SimpleNamespace(repo_id=f"someone/{name}")

    def create_commit(self, repo_id, operations, **options):
        target = self._next(repo_id, options)
        for operation in operations:
            (target / operation.path_in_repo).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(operation.path_or_fileobj, target / operation.path_in_repo)
        return "committed"

    def upload_folder(self, repo_id, folder_path, path_in_repo="", **options):
        target = self._next(repo_id, {**options, "path_in_repo": path_in_repo})
        ignored = shutil.ignore_patterns(*options.get("ignore_patterns") or ())
        shutil.copytree(folder_path, target / path_in_repo, ignore=ignored, dirs_exist_ok=True)
        return _Done()

    def _next(self, repo_id, options):
        target = self.folder / str(len(self.uploads))
        target.mkdir(parents=True)
        self.uploads.append((repo_id, options, target))
        return target


def _check_model(folder, stock):
    """The folder is the one of a single process, and a model card."""
    card = folder / "README.md"
    assert card.is_file()
    card.unlink()
    check_same_folder(folder, stock)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@distributed(world_size=2)
def test_save_pretrained_uploads_what_it_has_saved(tmp_path, monkeypatch, name):
    hub = Hub(monkeypatch, tmp_path)
    model = zoo.build(name)
    hf_zero.shard(model, None, {"zero_stage": 3})
    folder = tmp_path / "mine"
    if dist.get_rank() == 0:
        folder.mkdir()
        (folder / "notes.txt").write_text("not for the Hub")
    dist.barrier()
    options = {"push_to_hub": True, "commit_message": "Upload", "token": "secret", "private": True}
    model.save_pretrained(folder, max_shard_size="20KB", **options)
    if dist.get_rank() == 1:
        assert hub.uploads == hub.repos == []
        return
    assert hub.repos == [("mine", {"exist_ok": True, "token": "secret", "private": True})], hub.repos
    ((repo, details, uploaded),) = hub.uploads
    assert (repo, details["commit_message"], details["token"]) == ("someone/mine", "Upload", "secret")
    twin_of(name).save_pretrained(tmp_path / "stock", max_shard_size="20KB")
    _check_model(uploaded, tmp_path / "stock")


def _refuse(*args, **kwargs):
    raise ValueError("you may not write to this repository")


@distributed(world_size=2)
def test_a_repository_that_cannot_be_made_is_an_error_on_all_ranks(tmp_path, monkeypatch):
    Hub(monkeypatch, tmp_path)
    monkeypatch.setattr(HfApi, "create_repo", _refuse)
    model = zoo.build("llama")
    hf_zero.shard(model, None, {"zero_stage": 3})
    with pytest.raises(ZeroCheckpointError, match="rank 0 of 2 failed: you may not write"):
        model.save_pretrained(tmp_path / "mine", push_to_hub=True)
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("adapters", [False, True])
@distributed(world_size=2)
def test_push_to_hub_of_a_sharded_model(tmp_path, monkeypatch, adapters):
    from tests.ranks.test_saving import _with_adapters

    hub = Hub(monkeypatch, tmp_path)
    make = (lambda: _with_adapters(False)) if adapters else (lambda: zoo.build("llama"))
    model = make()
    hf_zero.shard(model, None, {"zero_stage": 3})
    answer = model.push_to_hub("mine", commit_message="All of it")
    if dist.get_rank() == 1:
        assert answer is None and hub.uploads == hub.repos == []
        return
    ((repo, details, uploaded),) = hub.uploads
    assert (answer, repo, details["commit_message"]) == ("committed", "someone/mine", "All of it")
    make().save_pretrained(tmp_path / "stock")
    (tmp_path / "stock/README.md").unlink(missing_ok=True)
    _check_model(uploaded, tmp_path / "stock")


def _train_and_push(folder, strategy, asynchronous):
    with pytest.MonkeyPatch.context() as monkeypatch:
        hub = Hub(monkeypatch, folder)
        trainer = trainer_for(
            str(folder / "run"),
            3,
            4,
            per_device_train_batch_size=2,
            save_steps=2,
            save_total_limit=1,
            push_to_hub=True,
            hub_strategy=strategy,
            hub_always_push=True,
            zero_async_save=asynchronous,
        )
        trainer.train()
        trainer.push_to_hub("The end")
        return [(details["commit_message"], details["path_in_repo"], path) for _, details, path in hub.uploads]


@pytest.mark.parametrize(
    "strategy, asynchronous",
    [("end", True), ("every_save", False), ("checkpoint", False), ("checkpoint", True), ("all_checkpoints", False)],
)
def test_the_trainer_uploads_by_every_strategy(tmp_path, strategy, asynchronous):
    uploads, others = run_ranks(_train_and_push, tmp_path, strategy, asynchronous)
    assert others == []
    wanted = []
    for step in (2, 4) if strategy != "end" else ():
        wanted.append((f"Training in progress, step {step}", ""))
        if strategy != "every_save":
            place = "last-checkpoint" if strategy == "checkpoint" else f"checkpoint-{step}"
            wanted.append((f"Training in progress, step {step}, checkpoint", place))
    assert [upload[:2] for upload in uploads] == [*wanted, ("The end", "")], uploads
    for _, place, path in uploads:
        _, info = LlamaForCausalLM.from_pretrained(path / place, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"], info
        if place:
            commit.check_files(path / place)
            commit.check_tensors(path / place)
