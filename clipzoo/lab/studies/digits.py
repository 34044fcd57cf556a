"""Digits of the perspective, section 6.2: a classifier as contrastive learning, compared with the other losses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional

from clipzoo.errors import ConfigError, installation
from clipzoo.heads.vector import InnerProductHead
from clipzoo.lab.studies.figures import BLUE, GREEN, VERMILION, Drawing, panels
from clipzoo.lab.studies.framework import Check, Claim, Findings, Row, Study, Views, fit
from clipzoo.model import Model
from clipzoo.objectives.conditional import Conditional
from clipzoo.types import Batch, Count, NonNegative, Progress, Range, Rate, Seed

LABELS = 10
TWO, LABEL, IMAGE = "two-sided", "label given image", "image given label"
LOSSES = {TWO: (1.0, 1.0), LABEL: (0.0, 2.0), IMAGE: (2.0, 0.0)}
"""lambda_u and lambda_v, u the image."""
COLOURS = {TWO: BLUE, LABEL: VERMILION, IMAGE: GREEN}
Split = tuple[Tensor, Tensor]
"""Images [n, 1, 28, 28] in [0, 1] and labels [n] int64."""


@dataclass(frozen=True)
class Digits(Study):
    """Train LeNet with three losses and compare the models' distributions of labels and of images.

    mnist: folder with MNIST (<mnist>/MNIST/raw); null for scikit-learn's digits. test_share: fraction of scikit-learn's
    digits used for testing. batch, epochs, rate: settings of Adam. shown: label whose images are drawn. drawn: number
    of images drawn. candidates: number of test images whose predicted labels are shown. identity_tolerance: absolute
    tolerance of proposition 6.1. seeds: trainings per loss; tables show their mean, figures the first. seed: first
    seed.
    """

    mnist: str | None
    test_share: Annotated[float, Range(above=0, below=1)]
    batch: Count
    epochs: Count
    rate: Rate
    shown: Count
    drawn: Count
    candidates: Count
    identity_tolerance: NonNegative
    seeds: Count
    seed: Seed

    title = "Digits"
    source = "A mathematical perspective on contrastive learning, section 6.2, proposition 6.1, figures 11 and 12"
    question = (
        "A LeNet's ten outputs are the image's embedding, the one-hot label is the other, and their inner product "
        "tilts the marginals. Trained to match labels given images, images given labels, or both: what is each model's "
        "distribution of labels for an image, and of images for a label?"
    )
    differs = (
        "scikit-learn's 1,797 digits of 8 x 8, enlarged to 28 x 28, take MNIST's place unless `study.mnist` says where "
        "that is; smaller batches, a higher rate that falls to zero and fewer epochs go with it.",
        "The paper's section names the weights (2, 0) and (0, 2) the other way round than its section 3: here λ_v "
        "alone is the classifier.",
        "The loss of images given labels does not see a constant added to a label's output. Probabilities of labels "
        "are shown from the outputs as they are, as in the paper; the table also has them with each label's "
        "log-mean-exp over the training images taken off.",
    )

    def run(self) -> Findings:
        rows: list[Row] = []
        for seed in range(self.seed, self.seed + self.seeds):
            # The seed also splits scikit-learn's digits into train and test.
            train, held_out = load_digits(self.mnist, self.test_share, seed)
            trained = {
                name: fit(
                    lambda: lenet(LABELS), lambda: InnerProductHead(LABELS, LABELS, embed_width=None, temperature=1.0),
                    Conditional(*lambdas), *train, steps=self.epochs * len(train[0]) // self.batch, batch=self.batch,
                    rate=self.rate, seed=seed,
                )
                for name, lambdas in LOSSES.items()
            }  # fmt: skip
            answers, labels = {name: outputs_of(model, held_out[0]) for name, model in trained.items()}, held_out[1]
            right = functional.one_hot(labels, LABELS).double()
            for name, model in trained.items():
                calibrated = answers[name] - outputs_of(model, train[0]).logsumexp(dim=0)
                weights, probabilities = answers[name].softmax(dim=0), answers[name].softmax(dim=1)
                entropy = -(weights * weights.clamp_min(1e-300).log()).sum(dim=0)
                generator = torch.Generator().manual_seed(self.seed)
                drawn = torch.multinomial(weights.mT, self.drawn, replacement=True, generator=generator)
                rows.append({
                    "loss": name,
                    "accuracy": float((answers[name].argmax(dim=1) == labels).double().mean()),
                    "log_loss": float(functional.cross_entropy(answers[name], labels)),
                    "label_entropy": float(-(probabilities * probabilities.clamp_min(1e-300).log()).sum(dim=1).mean()),
                    "accuracy_without_offsets": float((calibrated.argmax(dim=1) == labels).double().mean()),
                    "log_loss_without_offsets": float(functional.cross_entropy(calibrated, labels)),
                    # Perplexity of a label's distribution over images.
                    "effective_images": float(entropy.exp().mean()),
                    "weight_on_right_label": float((weights * right).sum(dim=0).mean()),
                    "images_of_a_label": float(right.sum(dim=0).mean()),
                    "different_of_drawn": sum(len(set(row.tolist())) for row in drawn) / LABELS,
                    "seed": seed,
                })  # fmt: skip
            if seed == self.seed:
                test, models, outputs = held_out, trained, answers
        # Both sides of proposition 6.1 on a batch with equally many images of every label.
        (images, labels), model = test, models[TWO]
        per_label = int(labels.bincount(minlength=LABELS).min())
        chosen = torch.cat([(labels == label).nonzero()[:per_label, 0] for label in range(LABELS)])
        batch = Batch(images[chosen], labels[chosen], chosen)
        with torch.no_grad():
            loss = Conditional(*LOSSES[LABEL])(model(batch), batch, Progress(0, 1, len(batch), len(batch))).total
        cross_entropy = functional.cross_entropy(outputs_of(model, batch.image), batch.text)
        proposition = "cross-entropy less log 10 is the loss of labels given images, all labels equally often"
        difference = float(cross_entropy) - math.log(LABELS)
        check = Check(f"proposition 6.1: {proposition}", float(loss), difference, self.identity_tolerance)
        means = pd.DataFrame(rows).drop(columns="seed").groupby("loss", sort=False).mean()
        by_loss: dict[str, Row] = {str(name): {"loss": name, **row} for name, row in means.to_dict("index").items()}
        claims = list(self._claims(by_loss))
        verdict = (
            f"Test accuracy is {100 * by_loss[LABEL]['accuracy']:.1f} % trained on labels given images and "
            f"{100 * by_loss[TWO]['accuracy']:.1f} % two-sided; a label's distribution over the {len(test[0])} test "
            f"images is spread over {by_loss[LABEL]['effective_images']:.1f}, {by_loss[TWO]['effective_images']:.1f} "
            f"and, trained on images given labels, {by_loss[IMAGE]['effective_images']:.1f} of them; "
            f"{Claim.count(claims)}."
        )
        tables = {"losses": list(by_loss.values()), "trainings": rows}
        return Findings(verdict, [check], claims, tables, self._drawings(outputs, test))

    def _claims(self, rows: Mapping[str, Row]) -> Iterator[Claim]:
        def say(key: str, form: str = ".3f") -> str:
            return ", ".join(f"{name} {rows[name][key]:{form}}" for name in LOSSES)

        best, others = rows[LABEL], (rows[TWO], rows[IMAGE])
        yield Claim(
            "The loss of labels given images predicts the true label most accurately (figure 11).",
            f"accuracy: {say('accuracy')}; log loss: {say('log_loss')}",
            all(best["accuracy"] >= row["accuracy"] and best["log_loss"] < row["log_loss"] for row in others),
        )
        yield Claim(
            "The two other losses leave probability on other labels.",
            f"mean entropy of the predicted labels, nats: {say('label_entropy', '.4f')}",
            all(row["label_entropy"] > best["label_entropy"] for row in others),
        )
        yield Claim(
            "For a label, the model of labels given images concentrates on few images; the two others draw diverse "
            "ones (figure 12).",
            f"effective number of images: {say('effective_images', '.1f')}; different among {self.drawn} drawn: "
            f"{say('different_of_drawn', '.1f')}",
            all(row["effective_images"] > 2 * best["effective_images"] for row in others),
        )
        yield Claim(
            "All images drawn belong to the label.",
            f"weight on images of the right label: {say('weight_on_right_label')}",
            all(row["weight_on_right_label"] > 0.95 for row in rows.values()),
        )

    def _drawings(self, outputs: Mapping[str, Tensor], test: Split) -> dict[str, Drawing]:
        # Label probabilities of the test images on which the losses disagree most.
        images, labels = test
        probabilities = {name: output.softmax(dim=1) for name, output in outputs.items()}
        wrong = [1 - values.gather(1, labels[:, None])[:, 0] for values in probabilities.values()]
        doubt = torch.where(probabilities[LABEL].argmax(dim=1) == labels, torch.stack(wrong).sum(dim=0), -1.0)
        chosen = doubt.argsort(descending=True)[: self.candidates].tolist()
        doubted, axes = panels(self.candidates, 4, 2.3, 1.8)
        for place, index in enumerate(chosen):
            picture, *bars = axes[4 * place : 4 * place + 4]
            picture.imshow(images[index, 0], cmap="gray_r")
            picture.set(xticks=[], yticks=[], xlabel=f"label {int(labels[index])}")
            picture.spines[:].set_visible(False)
            for axis, (name, values) in zip(bars, probabilities.items(), strict=True):
                axis.bar(range(LABELS), values[index], color=COLOURS[name])
                axis.set(xticks=range(LABELS), yticks=[0, 0.5, 1], ylim=(0, 1.05), title=name if place == 0 else "")
                axis.tick_params(labelsize=7)
                axis.get_xticklabels()[int(labels[index])].set_fontweight("bold")
                axis.set_xlabel("label" if index == chosen[-1] else "")
            bars[0].set_ylabel("probability")

        likely, axes = panels(1, len(LOSSES), 2.6, 2.9)
        side = math.isqrt(self.drawn)
        for axis, (name, output) in zip(axes, outputs.items(), strict=True):
            weights = output[:, self.shown].softmax(dim=0)
            generator = torch.Generator().manual_seed(self.seed)
            drawn = torch.multinomial(weights, side * side, replacement=True, generator=generator)
            tiles = functional.pad(images[drawn, 0], (2, 2, 2, 2))
            axis.imshow(torch.cat([torch.cat(list(row), dim=1) for row in tiles.split(side)]), cmap="gray_r")
            axis.set(xticks=[], yticks=[], title=name)
            axis.spines[:].set_visible(True)
        doubted_text = (
            "Figure 11: probabilities of the labels (bold: the right one) for the test images that the three losses "
            "doubt most among those that the classifier knows."
        )
        likely_text = f"Figure 12: test images drawn from each model's distribution given the label {self.shown}."
        return {"labels": (doubted, doubted_text), "images": (likely, likely_text)}


def lenet(labels: int) -> Views:
    """LeNet-5 with ReLU on images [b, 1, 28, 28], and one-hot vectors of labels [b]. Both have `labels` features."""
    network = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, labels),
    )  # fmt: skip
    return Views(network, nn.Embedding.from_pretrained(torch.eye(labels)), labels, labels)


def outputs_of(model: Model, images: Tensor) -> Tensor:
    """Inner products of the images with every label: [n, 1, 28, 28] -> [n, 10] float64."""
    with torch.no_grad():
        labels = model.encode_text(torch.arange(LABELS))
        blocks = [model.similarity(model.encode_image(block), labels) for block in images.split(1000)]
    return torch.cat(blocks).double()


def load_digits(mnist: str | None, test_share: float, seed: int) -> tuple[Split, Split]:
    """Load the train and test splits: MNIST of the folder `mnist`, or scikit-learn's digits split by `seed`."""
    if mnist is not None:
        from torchvision.datasets import MNIST

        try:
            splits = [MNIST(mnist, train=train, download=False) for train in (True, False)]
        except RuntimeError:
            raise ConfigError(
                f"study.mnist={mnist} does not contain MNIST: expected its four files in {mnist}/MNIST/raw"
            ) from None
        train, test = ((split.data.float()[:, None] / 255, split.targets.long()) for split in splits)
        return train, test
    try:
        from sklearn.datasets import load_digits as bundled
    except ImportError:
        how = installation("studies")
        raise ConfigError(f"scikit-learn is not installed: {how}, or set study.mnist=FOLDER") from None
    digits = bundled()
    small = torch.from_numpy(digits.images).float()[:, None] / 16
    # Enlarge to the size of MNIST so that both use the same network.
    images = functional.interpolate(small, size=(28, 28), mode="bilinear", align_corners=False)
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    train_rows, test_rows = order[round(test_share * len(images)) :], order[: round(test_share * len(images))]
    return (images[train_rows], labels[train_rows]), (images[test_rows], labels[test_rows])
