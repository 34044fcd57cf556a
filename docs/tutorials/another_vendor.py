# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # Pictures of another vendor
#
# A model is useful if it recognises pictures that are drawn by another hand. This tutorial trains on Google's emoji and judges the model on
# Twitter's. On the way, a table of pictures becomes training shards and an evaluation dataset, by the commands that serve any pictures.
# The page is an executed notebook ([notebook](another_vendor.ipynb)).
#
# **Licences.** Google's pictures are Noto Emoji under the Apache License 2.0. Twitter's are Twemoji under CC BY 4.0; attribute them to
# "Twemoji by Twitter, Inc and other contributors". The names come from unicode-emoji-json (MIT). The command prints all three.
#
# ## Fetch the pictures
#
# `clipzoo emoji` fetches the packages with npm (136 MB, kept in `data/npm`) and writes one folder of pictures and one table per vendor.

# %%
# !clipzoo emoji

# %%
# !head -4 data/emoji/google.csv

# %% [markdown]
# ## Shards for training
#
# A table with a column of paths and a column of captions becomes shards. Whatever cannot be used is counted and named.

# %%
# !clipzoo shards make data/emoji/google.csv data/vendors/train --caption name

# %%
# !clipzoo shards look data/vendors/train

# %%
# alt: Google's emoji on white.
import tarfile

from PIL import Image

sheet = Image.new("RGB", (760, 285), "white")
with tarfile.open("data/vendors/train/00000.tar") as shard:
    names = [name for name in shard.getnames() if name.endswith(".png")]
    for number, name in enumerate(names[:24]):
        picture = Image.open(shard.extractfile(name)).convert("RGBA").resize((95, 95))
        sheet.paste(picture, (number % 8 * 95, number // 8 * 95), picture)
sheet

# %% [markdown]
# ## An evaluation dataset
#
# The other vendor's table becomes a classification dataset: the class of a picture is its name, and a class is described by the template `{c}`, which is
# only the name. A second dataset measures retrieval.

# %%
# !clipzoo datasets make data/emoji/twitter.csv data/vendors/downstream/names --label name --template '{c}'

# %%
# !clipzoo datasets make data/emoji/twitter.csv data/vendors/downstream/search --caption name

# %% [markdown]
# ## Train and evaluate
#
# `experiment=emoji/clip` has the small towers; the overrides name the folders that were just made, and shorten the 40 epochs of the experiment to 12.
# One command trains on one vendor and evaluates on the other.

# %%
# !clipzoo train experiment=emoji/clip name=vendors data.shards=data/vendors/train eval.root=data/vendors/downstream eval.zero_shot=[names] eval.retrieval=[search] trainer.epochs=12

# %% [markdown]
# Chance among 1,906 names is 0.05 %. With all 40 epochs (`make emoji`) the top-1 accuracy is 28.3 %;
# [benchmarks](../benchmarks/methods.md#real-pictures-of-another-vendor) compare CLIP, WPSE and KME-CLIP on these pictures.
#
# ## Search
#
# An index embeds pictures once; a search then takes one caption's embedding and one matrix product.

# %%
# !clipzoo index runs/emoji/vendors --images data/emoji/twitter --output indices/twitter

# %%
# !clipzoo search "flag of france" "birthday cake" --index indices/twitter --count 3

# %% [markdown]
# ## Judge by eye
#
# The best pictures of Twitter for words that the model learned from Google's.

# %%
# alt: Four rows of five emoji by Twitter, the best matches for four captions.
from pathlib import Path

import clipzoo
import torch
from matplotlib import pyplot
from PIL import Image

model = clipzoo.load("runs/emoji/vendors").requires_grad_(False)
paths = sorted(Path("data/emoji/twitter").glob("*.png"))
images = model.encode_image(torch.stack([model.transform(Image.open(path)) for path in paths]))
captions = ["red heart", "soccer ball", "flag of japan", "slice of pizza"]
scores = model.similarity(images, model.encode_text(model.tokenizer(captions)))
figure, places = pyplot.subplots(4, 5, figsize=(6, 5), dpi=100, layout="constrained")
for column, (caption, row) in enumerate(zip(captions, places, strict=True)):
    for place, best in zip(row, scores[:, column].topk(5).indices.tolist(), strict=True):
        picture = Image.open(paths[best]).convert("RGBA")
        place.imshow(Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture))
        place.axis("off")
    row[0].set_title(caption, loc="left", fontsize=9)
_ = pyplot.show()

# %% [markdown]
# Next: [training on your own pictures](../getting_started.md#train-on-your-own-pictures).
