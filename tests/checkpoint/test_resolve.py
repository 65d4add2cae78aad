"""Resolution of a model's name or path to its directory."""

import huggingface_hub
import pytest

from checkpoints import read_tokenizer
from secondguess.checkpoint.resolve import find_checkpoint
from secondguess.errors import CheckpointError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """The directory of `org/tiny` in a Hugging Face cache, as `hf download` lays it out."""
    repository = tmp_path / "models--org--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return snapshot


def test_a_name_is_looked_up_in_the_cache(cached):
    assert find_checkpoint("org/tiny") == str(cached)


@pytest.mark.parametrize("name", ["org/gone", "gone", "no name?", "x" * 200, "org/tiny.git"])
def test_a_name_that_is_not_in_the_cache_is_refused(cached, name):
    with pytest.raises(CheckpointError, match="hf download"):
        find_checkpoint(name)


@pytest.mark.parametrize("is_beside", [True, False])
@pytest.mark.parametrize("is_cached", [True, False])
def test_an_adapter_is_refused_with_or_without_a_model_beside_it(is_cached, is_beside, cached):
    (cached / "adapter_config.json").write_text("{}")
    name = "org/tiny" if is_cached else str(cached)
    assert find_checkpoint(name) == str(cached)  # without weights of an adapter
    (cached / "adapter_model.safetensors").touch()
    if not is_beside:
        (cached / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"PEFT adapter .*merge_and_unload"):
        find_checkpoint(name)


def test_a_cached_repository_without_a_configuration_is_refused(cached):
    (cached / "config.json").unlink()
    with pytest.raises(CheckpointError, match="org/tiny"):
        find_checkpoint("org/tiny")


@pytest.mark.parametrize("file", ["x.gguf", "Q4_K_M/x.gguf", "a/b/x.gguf"])
@pytest.mark.parametrize("repository", ["org/tiny", "tiny"])
def test_a_gguf_file_of_a_cached_repository_is_found_in_any_subfolder(cached, repository, file):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    if repository == "tiny":
        cached.parents[1].rename(cached.parents[2] / "models--tiny")
        cached = cached.parents[2] / "models--tiny" / "snapshots" / COMMIT
    path = cached / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    assert find_checkpoint(f"{repository}/{file}") == str(path)
    with pytest.raises(CheckpointError, match="REPOSITORY/FILE"):
        find_checkpoint(f"{repository}/other/{file}")


def test_a_cached_repository_without_a_tokenizer_is_to_be_fetched(cached, tmp_path):
    with pytest.raises(CheckpointError, match=r"fetch them with `hf download org/tiny`"):
        read_tokenizer(find_checkpoint("org/tiny"))
    with pytest.raises(CheckpointError, match="copy them there, too"):
        read_tokenizer(str(tmp_path))
