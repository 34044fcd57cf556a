# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # Your first model
#
# This tutorial trains a CLIP model on generated scenes, looks at its learning curve, classifies a picture that it has never seen, and finds
# pictures by a caption. It needs two CPU cores and about five minutes. The page is an executed notebook: everything below was printed by these
# commands, with one thread on a machine that other jobs kept busy ([notebook](first_model.ipynb)). It runs as it is on a free GPU, such as Colab's,
# too: set `REPOSITORY = "git+https://..."`, where clipzoo is installed from.

# %%
# !clipzoo --version || pip install --quiet "clipzoo[fast,tables] @ $REPOSITORY"

# %% [markdown]
# ## The data
#
# The generated world has scenes of coloured shapes and captions that describe them. The command writes training shards, and datasets of
# held-out scenes for the evaluation.

# %%
# !clipzoo world --train 4000 --probe 200 --test 250 --scenes 250

# %% [markdown]
# A shard is a tar file with an image and its caption side by side. `clipzoo shards look` reads shards as the training does, counts what cannot
# be used, and writes a page with pictures of samples.

# %%
# !clipzoo shards look data/demo/train

# %%
# alt: Generated scenes of coloured shapes.
import tarfile

from PIL import Image

sheet = Image.new("RGB", (760, 285), "white")
with tarfile.open("data/demo/train/00000.tar") as shard:
    names = [name for name in shard.getnames() if name.endswith(".jpg")]
    for number, name in enumerate(names[:24]):
        picture = Image.open(shard.extractfile(name)).convert("RGBA").resize((95, 95))
        sheet.paste(picture, (number % 8 * 95, number // 8 * 95), picture)
sheet

# %% [markdown]
# ## Training
#
# An experiment configures a whole run: encoder, head, objective, data and evaluation. `KEY=VALUE` changes one setting; here the run is shorter than
# `make demo` and has another name. The evaluation at its end is part of the command.

# %%
# !clipzoo train experiment=demo/clip name=first trainer.epochs=8 eval.linear_probe=[] trainer.log_every=25

# %% [markdown]
# Typing the same command again does nothing, because the run is finished; had it been interrupted, the command would resume it.
# The folder `runs/first` holds everything about the run: `config.yaml`, `metrics.jsonl`, checkpoints, `results.json` and the page `report.md`.
#
# ## The learning curve
#
# Every line of `metrics.jsonl` is a JSON object. The loss starts near the logarithm of the batch size, 4.85 for 128, which is the
# loss of a model that cannot tell the captions of a batch apart.

# %%
# alt: The loss falls from 4.9 to 1.9 in 250 steps.
import json
from pathlib import Path

from matplotlib import pyplot

records = [json.loads(line) for line in Path("runs/first/metrics.jsonl").read_text().splitlines()]
records = [record for record in records if "loss" in record]
figure, axes = pyplot.subplots(figsize=(7, 2.6), dpi=100, layout="constrained")
axes.plot([record["step"] for record in records], [record["loss"] for record in records], marker="o", markersize=3)
axes.set(xlabel="step", ylabel="contrastive loss", ylim=0)
axes.grid(alpha=0.3)
_ = pyplot.show()

# %% [markdown]
# ## The model
#
# `clipzoo.load` returns a torch module with the image transform and the tokenizer of its training. Zero-shot classification compares a picture with one
# sentence per class. The picture comes from the held-out scenes.

# %%
# alt: A held-out scene, which the model classifies below.
import io
import tarfile

import clipzoo
import torch
from PIL import Image

model = clipzoo.load("runs/first").requires_grad_(False)
pictures = []
for shard in sorted(Path("data/demo/downstream/scenes/test").glob("*.tar")):
    with tarfile.open(shard) as tar:
        files = [member for member in tar if member.name.endswith((".png", ".jpg", ".jpeg", ".webp"))]
        pictures += [Image.open(io.BytesIO(tar.extractfile(member).read())) for member in files]
print(f"{len(pictures)} held-out scenes")
pictures[3].resize((192, 192))

# %%
colours = ["red", "green", "blue", "yellow", "purple", "orange"]
image = model.encode_image(model.transform(pictures[3])[None])
text = model.encode_text(model.tokenizer([f"a scene with a {colour} shape" for colour in colours]))
for score, colour in sorted(zip(model.similarity(image, text)[0].tolist(), colours), reverse=True):
    print(f"{score:6.2f}  {colour}")

# %% [markdown]
# ## Search
#
# The same scores rank pictures for a caption. These are the six best of the held-out scenes.

# %%
# alt: The six held-out scenes with the highest scores for the caption a red circle.
caption = "a red circle"
images = model.encode_image(torch.stack([model.transform(picture) for picture in pictures]))
scores = model.similarity(images, model.encode_text(model.tokenizer([caption])))[:, 0]
figure, places = pyplot.subplots(1, 6, figsize=(7, 1.5), dpi=100, layout="constrained")
for place, row in zip(places, scores.topk(6).indices.tolist(), strict=True):
    place.imshow(pictures[row])
    place.set_title(f"{scores[row]:.1f}", fontsize=9)
    place.axis("off")
_ = pyplot.show()

# %% [markdown]
# Next: [getting started](../getting_started.md) trains on real pictures and on your own.
