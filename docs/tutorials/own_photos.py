# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # Search your own photos
#
# Pictures are embedded once, and then found by a sentence or by another picture. The notebook runs as it is on a machine with or without a GPU, such
# as a free one of Colab or Kaggle ([notebook](own_photos.ipynb)).
#
# `MODEL` is any name that `clipzoo.load` takes: open_clip's weights, which are downloaded once (600 MB), a model on the Hugging Face hub, or a run of
# your own. Without a folder `PHOTOS` the notebook draws scenes, so that there is something to find. The page shows these scenes and the model that
# `make demo` trains on such scenes in a few minutes (`MODEL=runs/demo`), as no weights were downloaded for it.

# %%
import importlib.util
import os
import subprocess
import sys

REPOSITORY = os.environ.get("REPOSITORY", "")  # where clipzoo is installed from if it is missing: git+https://...
MODEL = os.environ.get("MODEL", "open_clip:ViT-B-32/laion2b_s34b_b79k")
PHOTOS = os.environ.get("PHOTOS", "photos")

if importlib.util.find_spec("clipzoo") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", f"clipzoo[fast] @ {REPOSITORY}"], check=True)

# %%
from pathlib import Path

if not Path(PHOTOS).is_dir():
    world = [sys.executable, "-m", "clipzoo.cli", "world", "--root", "scenes", "--processes", "1"]
    subprocess.run([*world, "--train", "256", "--probe", "20", "--test", "20", "--scenes", "20"], check=True)
    PHOTOS = "scenes/train"

# %% [markdown]
# ## Embed the pictures once
#
# The index is a folder. The same cell completes an interrupted index, and refuses one of other pictures or another model.

# %%
import torch

import clipzoo

model = clipzoo.load(MODEL, device="cuda" if torch.cuda.is_available() else "cpu")
index = clipzoo.build_index(model, MODEL, PHOTOS, "photos_index", report=print)
print(len(index), "pictures")

# %% [markdown]
# ## Search by a sentence

# %%
# alt: The four best pictures of three captions, each with its logit.
from matplotlib import pyplot

from clipzoo.explore.index import read_gallery

gallery = read_gallery(PHOTOS)
place = {name: row for row, name in enumerate(gallery.names)}


def show(rows):
    figure, axes = pyplot.subplots(len(rows), 4, figsize=(8, 2.2 * len(rows)), squeeze=False)
    for line, (title, matches) in zip(axes, rows.items()):
        for axis, (name, score) in zip(line, matches):
            axis.imshow(gallery.images[place[name]].convert("RGB"))
            axis.set(xticks=[], yticks=[], xlabel=f"{score:.1f}")
        line[0].set_title(title, loc="left")
    figure.tight_layout()
    pyplot.show()


captions = ["a red circle", "two blue squares", "a green triangle"]
show(dict(zip(captions, index.search(captions, count=4))))

# %% [markdown]
# ## Search by a picture
#
# Rows and logits of the pictures that are most similar to one picture; the best is the picture itself.

# %%
# alt: A picture and the three pictures that are most similar to it.
picture = model.encode_image(gallery.images[0])
show({"like the first": [(index.names[row], score) for row, score in index.nearest(picture, 4)]})

# %% [markdown]
# `clipzoo explore MODEL --images PHOTOS` opens the same search as a page in a browser, with neighbours and a map of all pictures
# ([explore](../how_to/explore.md)).
