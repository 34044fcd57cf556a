"""Libraries that publish weights: downloads from the hub (a server on this machine), and modules imported alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from huggingface_hub import constants

from clipzoo.errors import ConfigError
from clipzoo.io.weights import from_hub, import_alone, unreachable
from tests.support.hub import hub
from tests.support.huggingface_models import write_bert
from tests.support.paths import ROOT
from tests.support.runs import free_port

TRAINING = [
    "data.workers=0", "trainer.global_batch=16", "trainer.epochs=null", "trainer.steps=2", "trainer.device=cpu",
    "trainer.precision=float32", "optim.schedule.warmup_epochs=0.3", "name=run",
]  # fmt: skip


def test_a_hub_that_accepts_no_connection_is_named_at_once_and_its_cache_is_still_read(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    message = "the model cannot be loaded .http://127.0.0.1:.* cannot be reached: Connection refused; nor is it in the"
    with pytest.raises(ConfigError, match=message), from_hub("owner/model", "the model cannot be loaded"):
        assert constants.HF_HUB_OFFLINE
        raise OSError("not in the cache")
    assert not constants.HF_HUB_OFFLINE
    with from_hub("owner/model", "the model cannot be loaded"):
        pass  # from the cache
    # A folder needs no hub.
    with from_hub(str(tmp_path), "the model cannot be loaded"):
        assert not constants.HF_HUB_OFFLINE


def test_behind_a_proxy_the_libraries_make_the_connection(monkeypatch):
    address = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    assert unreachable(address) is None


def train(endpoint: str, tmp_path: Path, *changes: str) -> subprocess.CompletedProcess[str]:
    """Train two steps in a fresh process, because huggingface_hub reads its environment when it is imported."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1",
                   "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}  # fmt: skip
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "train.py", f"runs={tmp_path / 'runs'}", *TRAINING, *changes]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_models_and_weights_of_the_hub_train_and_what_fails_is_one_quick_message(tiny_shards, tmp_path):
    write_models(tmp_path / "files")
    data = f"data.shards='{tiny_shards}'"
    text = ["encoder=towers", "encoder/image=timm", "encoder.image.name=hf-hub:org/timm", "encoder/text=huggingface"]
    with hub(tmp_path / "files") as endpoint:
        whole = ["encoder=open_clip", "encoder.name=hf-hub:org/clip"]
        done = train(endpoint, tmp_path, data, *whole, "init.weights=open_clip:hf-hub:org/clip", "head.embed_width=48")
        assert done.returncode == 0, done.stderr
        assert "tensors" not in done.stderr.partition("initial weights")[0] and "loaded" in done.stderr
        config = yaml.safe_load((tmp_path / "runs/run/config.yaml").read_text())
        assert config["encoder"]["mean"] == [0.5, 0.4, 0.3]

        towers = [*text, "encoder.text.name=org/bert", "name=towers",
                  "init.text=huggingface", "encoder.image.pretrained=true"]  # fmt: skip
        done = train(endpoint, tmp_path, data, *towers)
        assert done.returncode == 0, done.stderr

        for changes, message in (
            (["encoder=open_clip", "encoder.name=hf-hub:org/nothing"], "hf-hub:org/nothing cannot be read from"),
            (["encoder=open_clip", "encoder.name=hf-hub:org/bert"], "hf-hub:org/bert cannot be read from"),
            ([*text, "encoder.text.name=org/nothing"], "and the Hugging Face hub does not give it"),
        ):
            assert_fails(train(endpoint, tmp_path, data, *changes, "name=other"), message)
    begin = time.perf_counter()
    done = train(endpoint, tmp_path, data, "encoder=open_clip", "encoder.name=hf-hub:org/other", "name=other")
    assert_fails(done, f"{endpoint} cannot be reached: Connection refused; nor is it in the cache")
    assert time.perf_counter() - begin < 200  # the start of a process on a busy machine
    # What has been downloaded needs no network.
    done = train(endpoint, tmp_path, data, *whole, "name=again")
    assert done.returncode == 0, done.stderr


def assert_fails(done: subprocess.CompletedProcess[str], message: str) -> None:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert done.returncode == 2 and message in lines[-1] and len(lines) == 1, done.stderr


def write_models(folder: Path) -> None:
    """Small models: org/clip of open_clip, org/bert of transformers, org/timm of timm."""
    import timm
    from safetensors.torch import save_file

    from tests.support.open_clip_models import small_model

    _, peer = small_model("ViT-B-32", folder / "source")
    place = folder / "org" / "clip"
    place.parent.mkdir()
    (folder / "source" / "model").rename(place)
    content = json.loads((place / "open_clip_config.json").read_text())
    content["model_cfg"]["text_cfg"]["vocab_size"] = 49408
    (place / "open_clip_config.json").write_text(json.dumps(content))
    import open_clip

    peer = open_clip.create_model(f"local-dir:{place}", load_weights=False)
    save_file({name: value.contiguous() for name, value in peer.state_dict().items()},
              place / "open_clip_model.safetensors")  # fmt: skip
    write_bert(folder / "org" / "bert")
    place = folder / "org" / "timm"
    place.mkdir()
    model = timm.create_model("test_vit", num_classes=0)
    timm.models.save_for_hf(model, place, model_config={"num_classes": 0})


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package `large` whose `__init__` imports its module `heavy`; its module `light` needs neither."""
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .heavy import answer\nfrom . import light\nplain = light.value + 1\n")
    (folder / "heavy.py").write_text("answer = 42\n")
    (folder / "light.py").write_text("value = 1\nclass Kind: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "large"
    for name in [name for name in sys.modules if name.partition(".")[0] == "large"]:
        del sys.modules[name]


def test_a_module_is_imported_alone_and_its_package_is_complete_once_a_name_of_it_is_read(package: str) -> None:
    light = import_alone(f"{package}.light")
    assert light.value == 1 and f"{package}.heavy" not in sys.modules
    import large  # type: ignore[import-not-found]
    from large import answer

    assert (answer, large.plain) == (42, 2)
    assert large.light is light and large.light.Kind is light.Kind
    assert type(large) is ModuleType and large.__path__ and large.__name__ == "large"
    with pytest.raises(AttributeError, match="nothing"):
        large.nothing  # noqa: B018


def test_a_package_that_is_already_imported_stays_and_a_missing_one_is_reported_as_by_an_import(package: str) -> None:
    import large

    assert import_alone(f"{package}.light") is large.light
    assert type(large) is ModuleType
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_package'"):
        import_alone("no_such_package.module")


def test_a_failing_package_fails_again_when_it_is_read_again(package: str) -> None:
    import_alone(f"{package}.light")
    Path(sys.modules[package].__path__[0], "heavy.py").write_text("raise OSError('the disk is gone')\n")
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            from large import answer  # noqa: F401


@pytest.mark.slow
def test_towers_with_open_clips_blocks_import_neither_timm_nor_transformers() -> None:
    program = """
import sys, torch
from clipzoo.build import build_model
from clipzoo.config.compose import compose
model = build_model(compose(["encoder=tiny", "data.shards=x"]))
model.encoder.tokenizer(["a red square"])
assert not {"timm", "transformers"} & set(sys.modules), "imported for nothing"
from open_clip.transformer import TextTransformer
assert isinstance(model.encoder.text_tower.trunk, TextTransformer)
import open_clip
assert open_clip.create_model("ViT-B-32", pretrained=None) and open_clip.SimpleTokenizer and open_clip.__version__
assert open_clip.model.TextTransformer is TextTransformer and open_clip.list_models()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
