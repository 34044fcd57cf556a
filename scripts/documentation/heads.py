"""Geometry of the similarity heads: the score of one caption with every image whose features lie in a plane."""

from __future__ import annotations

import numpy
import torch
import yaml
from matplotlib.patches import Circle

from clipzoo.build import build_part
from clipzoo.config.groups import CONF
from clipzoo.heads.base import Head
from clipzoo.heads.meru import MeruHead, exterior_angle, half_aperture
from clipzoo.types import Features

from .drawing import BLUE, INK, ORANGE, SCORES, figure, save

SIDE, EDGE = 161, 1.6
CAPTION = torch.tensor([[0.9, 0.65]])
TOKENS = torch.tensor([[[0.95, 0.25, 0.8], [0.35, 1.0, 0.3], [-0.75, 0.55, 0.5]]])
"""Three tokens of a caption: two coordinates, and the entry from which the head computes the weight of the point."""
KERNEL = {"_target_": "clipzoo.heads.wpse.GaussianKernel", "width": 0.5}
CHANGED = {
    "kme": {"gamma": 4.0, "text_points": "caption"},
    "wpse": {"text_points": "caption", "kernel": KERNEL, "evaluation_features": 4096, "seed": 0, "temperature": 1.0},
    "filip": {"temperature": 1.0},
}
WEIGHT = 0.5
"""Weight entry of the image's only token."""
TITLES = {
    "clip": "CLIP: the angle counts", "inner_product": "Inner product: length counts too",
    "distance": "Squared distance: circles around the caption", "kme": "KME-CLIP: log of a sum of kernels",
    "wpse": "WPSE: sum of weighted kernels", "meru": "MERU: distance on the hyperboloid",
    "filip": "FILIP: the nearest of the caption's tokens",
}  # fmt: skip


def draw() -> None:
    """Write one figure per head to docs/images/heads."""
    for name, title in TITLES.items():
        _plane(name, title)
    _retrieval()


def built(name: str) -> Head:
    """Return the head of conf/head with d = 2 and projections that leave the plane as it is."""
    config = yaml.safe_load((CONF / "head" / f"{name}.yaml").read_text()) | {"embed_width": 2}
    config.pop("defaults", None)
    config["image_width"] = config["text_width"] = 3 if name in CHANGED else 2
    head = build_part(config | CHANGED.get(name, {"temperature": 0.07 if name == "clip" else 1.0})).eval()
    for side, module in head.named_parameters():
        if side.endswith("projection") and "weight" not in side:
            module.data.zero_()
            module.data[:2, :2] = torch.eye(2)
        elif side.endswith("alpha"):
            module.data.zero_()
        elif side.endswith("weight_projection"):
            module.data.copy_(torch.tensor([[0.0], [0.0], [1.0]]))
    return head


@torch.no_grad()
def _plane(name: str, title: str) -> None:
    head, points = built(name), TOKENS[0] if name in CHANGED else CAPTION
    caption = Features(TOKENS[:, 0], TOKENS) if name in CHANGED else Features(CAPTION)
    line = torch.linspace(-EDGE, EDGE, SIDE)
    vertical, horizontal = torch.meshgrid(line, line, indexing="ij")
    pooled = torch.stack([horizontal, vertical], dim=-1).reshape(-1, 2)
    tokens = torch.cat([pooled, torch.full((len(pooled), 1), WEIGHT)], dim=1)[:, None]
    images = Features(tokens[:, 0] if head.needs_tokens else pooled, tokens)
    scores = head.score(head.embed_image(images), head.embed_text(caption))[:, 0].reshape(SIDE, SIDE).numpy()
    drawn, (panel,) = figure(4.2, 3.5)
    extent = (-EDGE, EDGE, -EDGE, EDGE)
    picture = panel.imshow(scores, origin="lower", extent=extent, cmap=SCORES, interpolation="bilinear")
    panel.contour(scores, 8, extent=extent, colors="white", linewidths=0.7, alpha=0.8)
    bar = drawn.colorbar(picture, ax=panel, shrink=0.85)
    bar.set_label("score")
    bar.outline.set_visible(False)
    if name not in ("inner_product", "distance", "meru"):
        circle = Circle((0, 0), 1, fill=False, color="#24292f", linewidth=0.9, linestyle=(0, (4, 3)))
        panel.add_patch(circle)
    if isinstance(head, MeruHead):
        apex = head.embed_text(caption)
        outside = exterior_angle(apex, head.embed_image(images), head.curvature) - half_aperture(apex, head.curvature)
        cone = outside.reshape(SIDE, SIDE).numpy()
        panel.contour(cone, [0.0], extent=extent, colors="#24292f", linestyles="dashed", linewidths=1.2)
    for point in points:
        weight = point[2].item() if name in ("kme", "wpse") else 0.6
        panel.scatter(point[0], point[1], s=150 * weight, color="white", edgecolor="#24292f", zorder=5)
        stem = {"arrowstyle": "-", "color": "#24292f", "lw": 1.2}
        panel.annotate("", (point[0].item(), point[1].item()), (0, 0), arrowprops=stem)
    panel.set(title=title, xlabel="image feature 1", ylabel="image feature 2")
    save(drawn, f"heads/{name}")


@torch.no_grad()
def _retrieval() -> None:
    """CLOOB: embeddings of eight captions and of one image, before and after retrieval, for three values of beta."""
    angles = torch.tensor([0.0, 14, 36, 135, 200, 215, 300, 330]).deg2rad()
    memory = torch.stack([angles.cos(), angles.sin()], dim=1)
    query = torch.tensor([[66.0]]).deg2rad()
    query = torch.cat([query.cos(), query.sin()], dim=1)
    circle = numpy.linspace(0, 2 * numpy.pi, 200)
    drawn, panels = figure(7.6, 2.9, panels=3)
    for panel, beta in zip(panels, (2.0, 8.0, 30.0), strict=True):
        config = yaml.safe_load((CONF / "head" / "cloob.yaml").read_text())
        sizes = {"image_width": 2, "text_width": 2, "embed_width": 2}
        retrieved = build_part(config | sizes | {"beta": beta}).retrieve(query, memory)
        panel.plot(numpy.cos(circle), numpy.sin(circle), color=INK, linewidth=0.6, alpha=0.5)
        panel.scatter(memory[:, 0], memory[:, 1], s=26, color=BLUE, zorder=4, label="batch")
        panel.scatter(query[0, 0], query[0, 1], s=44, marker="s", color=INK, zorder=5, label="query")
        panel.scatter(retrieved[0, 0], retrieved[0, 1], s=60, marker="D", color=ORANGE, zorder=5, label="retrieved")
        arrow = {"arrowstyle": "->", "color": ORANGE, "lw": 1.4}
        panel.annotate("", tuple(retrieved[0].tolist()), tuple(query[0].tolist()), arrowprops=arrow)
        panel.set(aspect="equal", xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), title=f"beta = {beta:g}")
        panel.axis("off")
    panels[0].legend(loc="lower left", frameon=False, fontsize=8, borderaxespad=-0.5)
    save(drawn, "heads/cloob")
