"""Every head of conf/head in every format: it is exported with its logits, or refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import clipzoo
from clipzoo.cli import models as command
from clipzoo.errors import ConfigError
from clipzoo.exports.hub import FORMATS
from clipzoo.types import PointSet
from tests.support.exported import captions, loaded, logits, pictures
from tests.support.paths import CONF

HEADS = sorted(path.stem for path in (CONF / "head").glob("*.yaml"))
GRAPHS = ("image", "text", "score")
COSINES = ("clip", "cloob", "cosine")


@pytest.mark.parametrize("head", sorted(set(HEADS) - set(COSINES)))
@pytest.mark.parametrize("to", ["open_clip", "transformers"])
def test_a_head_that_is_no_scaled_cosine_is_refused_before_anything_is_written(head, to, tmp_path):
    with pytest.raises(ConfigError, match=f"{to} cannot represent this model: its head is .*Head, whose logits"):
        clipzoo.export(loaded(head), tmp_path / "exported", to)
    assert not (tmp_path / "exported").exists()


@pytest.mark.slow  # a conversion takes 3 to 10 s
@pytest.mark.parametrize("head", HEADS)
def test_programs_of_torch_give_the_logits_of_every_head(head, tmp_path):
    model = loaded(head)
    clipzoo.export(model, tmp_path, "torch")
    image, text, score = (torch.export.load(tmp_path / f"{name}.pt2").module() for name in GRAPHS)
    images, texts = pictures(7), captions(12)
    for count, other in ((1, 12), (7, 1), (7, 12)):
        pixels = torch.stack([model.transform(picture) for picture in images[:count]])
        result = score(*image(pixels), *text(model.tokenizer(texts[:other])))[0]
        torch.testing.assert_close(result, logits(model, images[:count], texts[:other]), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_graphs_of_onnx_give_the_logits_of_every_head(head, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    tokenizers = pytest.importorskip("tokenizers")
    model = loaded(head)
    clipzoo.export(model, tmp_path, "onnx")
    image, text, score = (onnxruntime.InferenceSession(tmp_path / f"{name}.onnx") for name in GRAPHS)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for batch in (1, 7, 64):
        images, texts = pictures(batch), captions(batch)
        pixels = torch.stack([model.transform(picture) for picture in images]).numpy()
        tokens = torch.tensor([encoding.ids for encoding in tokenizer.encode_batch(texts)])
        assert torch.equal(tokens, model.tokenizer(texts))
        inputs = [*image.run(None, {"pixels": pixels}), *text.run(None, {"tokens": tokens.numpy()})]
        (result,) = score.run(None, dict(zip([value.name for value in score.get_inputs()], inputs, strict=True)))
        expected = logits(model, images, texts)
        torch.testing.assert_close(torch.from_numpy(result), expected, rtol=1e-4, atol=1e-4)
    ours = model.encode_text(tokens)
    if isinstance(ours, PointSet):
        # Points that are absent have the same mask.
        assert torch.equal(torch.from_numpy(inputs[-1]).isinf(), ours.log_weights.isinf())


def test_an_export_never_overwrites_another_and_the_command_offers_every_format(tmp_path: Path):
    assert set(command.FORMATS) == set(FORMATS)
    for to, form in FORMATS.items():
        (tmp_path / to).mkdir()
        (tmp_path / to / form.mark).write_text("")
        with pytest.raises(ConfigError, match="already contains an exported model: choose another folder"):
            clipzoo.export(loaded("clip"), tmp_path / to, to)
    with pytest.raises(ConfigError, match=r"to=onxx is not a format \(open_clip, .*\); did you mean onnx"):
        clipzoo.export(loaded("clip"), tmp_path, "onxx")
