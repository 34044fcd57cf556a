"""The papers that heads and objectives come from, as BibTeX."""

from __future__ import annotations

_OF = {
    "ClipHead": ("clip",), "CloobHead": ("cloob",), "WpseHead": ("wpse",), "KmeHead": ("kme",),
    "DistanceHead": ("perspective",), "InnerProductHead": ("perspective",),
    "InfoNCE": ("infonce",), "InfoLOOB": ("cloob",), "SigLIP": ("siglip",), "DCL": ("dcl",), "CyCLIP": ("cyclip",),
    "SogCLR": ("sogclr",), "ISogCLR": ("isogclr",), "NUCLR": ("nuclr",), "Conditional": ("perspective",),
    "Joint": ("perspective",), "MMDConditional": ("perspective",), "MMDJoint": ("perspective",),
}  # fmt: skip
"""Class of a head or objective -> keys of its papers."""
_PAPERS = {
    "clip": ("inproceedings", "Learning Transferable Visual Models From Natural Language Supervision",
             "Radford, Alec and others", "International Conference on Machine Learning", 2021),
    "cloob": ("inproceedings", "CLOOB: Modern Hopfield Networks with InfoLOOB Outperform CLIP",
              "F{\\\"u}rst, Andreas and others", "Advances in Neural Information Processing Systems", 2022),
    "wpse": ("inproceedings", "Weighted Point Set Embedding for Multimodal Contrastive Learning Toward Optimal "
             "Similarity Metric", "Uesaka, Toshimitsu and Suzuki, Taiji and Takida, Yuhta and Lai, Chieh-Hsin and "
             "Murata, Naoki and Mitsufuji, Yuki", "International Conference on Learning Representations", 2025),
    "kme": ("misc", "Theoretical Refinement of CLIP by Utilizing Linear Structure of Optimal Similarity", None, None,
            None),
    "perspective": ("misc", "A Mathematical Perspective On Contrastive Learning",
                    "Baptista, Ricardo and Stuart, Andrew and Tran, Son", None, 2025),
    "infonce": ("misc", "Representation Learning with Contrastive Predictive Coding",
                "van den Oord, Aaron and Li, Yazhe and Vinyals, Oriol", None, 2018),
    "siglip": ("inproceedings", "Sigmoid Loss for Language Image Pre-Training", "Zhai, Xiaohua and others",
               "IEEE/CVF International Conference on Computer Vision", 2023),
    "dcl": ("inproceedings", "Debiased Contrastive Learning", "Chuang, Ching-Yao and others",
            "Advances in Neural Information Processing Systems", 2020),
    "cyclip": ("inproceedings", "CyCLIP: Cyclic Contrastive Language-Image Pretraining", "Goel, Shashank and others",
               "Advances in Neural Information Processing Systems", 2022),
    "sogclr": ("inproceedings", "Provable Stochastic Optimization for Global Contrastive Learning: Small Batch Does "
               "Not Harm Performance", "Yuan, Zhuoning and others", "International Conference on Machine Learning",
               2022),
    "isogclr": ("inproceedings", "Not All Semantics are Created Equal: Contrastive Self-supervised Learning with "
                "Automatic Temperature Individualization", "Qiu, Zi-Hao and others",
                "International Conference on Machine Learning", 2023),
    "nuclr": ("inproceedings", "On Discriminative Probabilistic Modeling for Self-Supervised Representation Learning",
              "Wang, Bokun and Lei, Yunwen and Ying, Yiming and Yang, Tianbao",
              "International Conference on Learning Representations", 2025),
}  # fmt: skip
"""Key -> type, title, authors, venue, year; None where it is not known."""


def citations(*targets: str) -> str:
    """Return the BibTeX of the papers of some `_target_`s, each paper once; empty for classes of other packages."""
    keys = dict.fromkeys(key for target in targets for key in _OF.get(target.rpartition(".")[2], ()))
    return "\n\n".join(_entry(key) for key in keys)


def _entry(key: str) -> str:
    kind, title, authors, venue, year = _PAPERS[key]
    fields = {"title": f"{{{title}}}", "author": authors, "booktitle": venue, "year": year}
    lines = ",\n".join(f"  {name} = {{{value}}}" for name, value in fields.items() if value is not None)
    return f"@{kind}{{{key},\n{lines}\n}}"
