"""The names of `import clipzoo`, and embeddings as users handle them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import clipzoo
from tests.support.heads import build_head, image_features, text_features


def test_public_names_are_listed_and_exist():
    assert set(clipzoo.__all__) <= set(dir(clipzoo))
    assert all(getattr(clipzoo, name) is not None for name in clipzoo.__all__)


def test_type_checkers_see_the_same_names_from_the_same_modules():
    stub = ast.parse(Path(clipzoo.__file__).with_suffix(".pyi").read_text())
    imports = {
        alias.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imports == clipzoo._MODULES


@pytest.mark.parametrize("name", ["clip", "kme", "wpse"])
def test_rows_of_embeddings_are_selected_and_concatenated(name):
    head = build_head(name).eval()
    with torch.no_grad():
        image, text = head.embed_image(image_features(5)), head.embed_text(text_features(4))
        scores = head.score(image, text)
        rows = torch.tensor([4, 0, 2])
        torch.testing.assert_close(head.score(image[rows], text[1:3]), scores[rows][:, 1:3])
        joined = clipzoo.concatenate([text[:1], text[1:]])
        torch.testing.assert_close(head.score(image, joined), scores)
