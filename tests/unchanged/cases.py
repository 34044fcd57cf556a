"""The tiny trainings that are recorded: every pair of head and objective in four modes, and variants of settings."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.unchanged.inputs import DAMAGED, PHOTOS, SHARDS

BASE = (
    "encoder=tiny", f"data.shards={SHARDS}", "data.workers=0", "trainer.global_batch=8", "trainer.epochs=null",
    "trainer.steps=20", "trainer.precision=float64", "trainer.save_every=4", "trainer.log_every=1",
    "trainer.device=cpu", "optim.schedule.warmup_epochs=1",
)  # fmt: skip
"""Overrides of every tiny training; no `name=`, so that the derived name of the run directory is recorded."""
EVALUATED = (
    "eval.root=benchmarks", "eval.zero_shot=[colours]", "eval.linear_probe=[colours]", "eval.retrieval=[things]",
    "eval.paired=true", "eval.batch_size=16", "eval.workers=0",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One training.

    ranks: number of processes. resumed: killed with SIGKILL after step 8 and resumed by the same command. used: its run
    directory is loaded with clipzoo.load and evaluated with `clipzoo evaluate`. first: overrides of a run before it.
    """

    key: str
    overrides: tuple[str, ...]
    ranks: int = 1
    resumed: bool = False
    used: bool = False
    first: tuple[str, ...] = ()


MODES = {"runs": ((), 1, False), "ranks": ((), 2, False), "micro": (("trainer.micro_batch=3",), 1, False)}
MODES["resume"] = ((), 1, True)
"""Part -> overrides, ranks, resumed."""


def pairs(checkout: Path, part: str, left_out: Collection[str]) -> Iterator[Case]:
    """Every head with every objective of the checkout's conf/ in one mode; incompatible pairs too.

    left_out: HEAD/OBJECTIVE of pairs that are left out.
    """
    overrides, ranks, resumed = MODES[part]
    for head in _options(checkout, "head"):
        for objective in _options(checkout, "objective"):
            names = (f"head={head}", f"objective={objective}")
            if f"{head}/{objective}" not in left_out:
                yield Case(f"{part}/{head}/{objective}", (*BASE, *names, *overrides), ranks, resumed)


def variants() -> Iterator[Case]:
    """Settings besides the defaults of a head, an objective or another part."""
    for name, text in VARIANTS.items():
        first, _, text = text.rpartition(" then ")
        words = text.split()
        given = [word for word in words if word not in WORDS]
        evaluated = EVALUATED if "evaluated" in words else ()
        ranks = 2 if "2ranks" in words else 1
        before = (*BASE, "name=first", *first.split()) if first else ()
        yield Case(f"variants/{name}", (*BASE, *evaluated, *given), ranks, "resumed" in words, "used" in words, before)


def encoders(checkout: Path) -> Iterator[Case]:
    """Two steps of every encoder of the checkout's conf/ in float32, without downloads."""
    short = ("trainer.global_batch=2", "trainer.steps=2", "trainer.precision=float32", "trainer.keep=1")
    for encoder in _options(checkout, "encoder"):
        if encoder not in DOWNLOADING:
            needed = NEEDED.get(encoder, "").split()
            yield Case(f"encoders/{encoder}", (*BASE[1:], f"encoder={encoder}", *needed, *short))


def trainings(checkout: Path, part: str, incompatible: Collection[str]) -> Iterator[Case]:
    """The cases of a part. incompatible: HEAD/OBJECTIVE of pairs that are known to be refused."""
    if part == "variants":
        return variants()
    return encoders(checkout) if part == "encoders" else pairs(checkout, part, incompatible)


DOWNLOADING = {"nuclr_rn50"}
"""Encoders whose tokenizer or weights are downloaded."""
NEEDED = {
    "open_clip": "encoder.name=RN50",
    "towers": (
        "encoder.image.name=test_vit encoder.image_size=32 encoder.text.name=bert encoder.text.tokenizer=clip "
        "+encoder.text.options={num_hidden_layers:1,hidden_size:32,num_attention_heads:2,intermediate_size:32} "
        "encoder.context_length=16"
    ),
}
"""Encoder -> the overrides that it needs."""
WORDS = {"2ranks", "resumed", "evaluated", "used"}
STUDIES = {
    "digits": "study.epochs=2 study.seeds=1",
    "gaussian_plane": "study.samples=1024 study.batch=128 study.steps=40 study.sign_draws=4",
    "gaussian_process": (
        "study.modes=50 study.widths=[2,5] study.batches=[32,128] study.sizes=[100,500] study.samples=500 "
        "study.batch=128 study.steps=40 study.seeds=1 study.paths=50"
    ),
    "gaussian_theorems": "study.samples=1024 study.batch=128 study.steps=40",
    "half_disc": (
        "study.sizes=[25,50] study.draws=3 study.shown=50 study.iterations=20 study.nuclr_steps=50 "
        "study.mini_steps=50 study.risk_samples=1000"
    ),
    "lagrangian": "study.samples=512 study.test_samples=128 study.epochs=2 study.width=32 study.layers=1",
    "mixture": "study.classes=[4] study.widths=[2,4] study.samples=2048 study.steps=40",
    "mutual_information": (
        "study.information=[2.0,10.0] study.trained_at=[10.0] study.steps=40 study.validation_batches=5 "
        "study.test_batches=20"
    ),
    "rank": (
        "study.inner_widths=[2,4] study.wpse_widths=[2] study.points=[2] study.features=64 study.steps=40 "
        "study.evaluation_features=256 study.small_features=[64,128] study.evaluation_draws=2"
    ),
    "rates": (
        "study.population=200 study.points=[1,2,4,8] study.point_draws=20 study.features=[64,128] "
        "study.feature_draws=20"
    ),
}
"""Name -> settings of the papers' small experiments in a few seconds."""
VALIDATED = f"eval.validation={PHOTOS} eval.batch_size=8 eval.workers=0 eval.every_epochs=2"
VARIANTS = {
    # Heads.
    "wpse_imq": "head=wpse head/kernel=imq",
    "wpse_linear": "head=wpse head.alpha=[1,0] head.image_points=3 head.text_points=caption head.reduction=sum",
    "wpse_nonlinear": "head=wpse head.alpha=[0,1]",
    "wpse_positive": "head=wpse head/kernel=imq head.text_points=caption head.weights=positive",
    "wpse_imq_2ranks": "head=wpse head/kernel=imq 2ranks",
    "kme_points": "head=kme head.image_points=3 head.text_points=caption",
    "kme_points_2ranks": "head=kme head.image_points=3 head.text_points=caption 2ranks",
    "cloob_no_hopfield": "head=cloob objective=infoloob head.hopfield=false",
    "cloob_beta": "head=cloob objective=infoloob head.beta=14.3 2ranks",
    # Objectives.
    "nuclr_dagger": "head=cosine objective=nuclr objective.learn_zeta=false",
    "nuclr_diamond": "head=cosine objective=nuclr objective.frozen_epochs=0 objective.positive=zeta objective.eta=1e-2",
    "nuclr_step": "head=cosine objective=nuclr objective.frozen_epochs=1 objective.xi_update=step objective.eta=1e-2",
    "nuclr_resumed": "head=cosine objective=nuclr objective.frozen_epochs=0 objective.eta=1e-2 2ranks resumed",
    "sogclr_positive": "head=cosine objective=sogclr objective.positive_in_denominator=true",
    "siglip_scale": "head=cosine objective=siglip objective.initial_scale=10",
    "cyclip_paper": (
        "head=cosine objective=cyclip objective.temperature=0.07 objective.learnable_temperature=true "
        "objective.in_modal=0.25 objective.cross_modal=0.25 2ranks"
    ),
    "conditional_labels": "head=distance objective=conditional objective.lambda_u=0 objective.lambda_v=2",
    "mmd_conditional_diagonal": "head=cosine objective=mmd_conditional objective.exclude_diagonal=true",
    "mmd_joint_fixed": "head=cosine objective=mmd_joint objective.median_unit=false",
    # Tiles.
    "tile_clip": "head=clip trainer.tile=4",
    "tile_wpse_2ranks": "head=wpse trainer.tile=3 2ranks",
    "tile_cloob_2ranks": "head=cloob objective=infoloob trainer.tile=3 2ranks",
    "tile_micro_batch_2ranks": "head=clip trainer.tile=3 trainer.micro_batch=3 2ranks",
    # Trainer and optimiser.
    "bf16": "trainer.precision=bf16",
    "bf16_kme": "head=kme trainer.precision=bf16",
    "fp16": "trainer.precision=fp16",
    "float32": "trainer.precision=float32",
    "fp16_resumed": "trainer.precision=fp16 resumed",
    "no_compile": "trainer.compile=false",
    "compile": "trainer.compile=true",
    "clip_gradient": "trainer.clip_gradient=0.05",
    "gather_bf16": "trainer.gather=bf16 2ranks",
    "foreground_saves": "trainer.save_in_background=false trainer.keep=1",
    "epochs": "trainer.steps=null trainer.epochs=5.5",
    "seed": "head=wpse seed=7",
    "restarts": "optim.schedule.restart_epochs=2",
    "restarts_resumed": "optim.schedule.restart_epochs=2 optim.schedule.per_epoch=true resumed",
    "per_epoch": "optim.schedule.per_epoch=true",
    "warmup_steps": "optim.schedule.warmup_epochs=null optim.schedule.warmup_steps=5",
    "betas": "optim.betas=[0.8,0.9] optim.weight_decay=0.1 optim.eps=1e-6",
    "activation_checkpointing": "encoder.image_tower.checkpoint=true encoder.text_tower.checkpoint=true",
    "distinct_pads": "head=wpse encoder.text_tower.distinct_pads=true",
    "loss_limit": "trainer.loss_limit=1",
    # Data.
    "workers": "data.workers=2",
    "workers_resumed_2ranks": "data.workers=1 2ranks resumed",
    "augmented": "data.flip=0.5 data.rand_augment=[2,9] data.crop_scale=[0.2,1.0]",
    "bilinear": "data.interpolation=bilinear data.shuffle_window=1",
    "photos_fast": f"data.shards={PHOTOS} data.decode=fast data.crop_scale=[0.8,1.0]",
    "photos_caption_key": f"data.shards={PHOTOS} data.caption_key=long",
    "mixture": f"data.shards=[{{path:'{SHARDS}',weight:2.0}},{{path:'{PHOTOS}',weight:1.0}}]",
    "damaged": f"data.shards={DAMAGED} data.max_bad_fraction=0.5",
    "too_damaged": f"data.shards={DAMAGED} data.max_bad_fraction=0.01",
    "shared_folder": "data.shards=shards data.index_folder=indexes",
    # Evaluation.
    "evaluated": "evaluated",
    "evaluated_2ranks": "evaluated 2ranks",
    "evaluated_wpse_draws": "head=wpse evaluated eval.draws=3",
    "evaluated_wpse_draws_2ranks": "head=wpse evaluated eval.draws=3 2ranks",
    "evaluated_kme": "head=kme evaluated",
    "evaluated_cloob": "head=cloob objective=infoloob evaluated",
    "evaluated_often": (
        "evaluated eval.every_epochs=2 trainer.best_metric=zero_shot/colours/top1 trainer.precision=float32"
    ),
    "evaluated_settings": (
        "evaluated eval.prompts=clip eval.interpolation=bilinear eval.probe_resize=1.143 eval.probe_validation=0.5 "
        "eval.seed=3 eval.precision=bf16"
    ),
    "evaluated_nuclr": "head=cosine objective=nuclr evaluated eval.linear_probe=[]",
    "missing_benchmark": "evaluated eval.zero_shot=[colours,food101]",
    "missing_reported": "evaluated eval.zero_shot=[colours,food101] eval.missing=report",
    # Weights divided among ranks.
    "fsdp": "head=wpse trainer.parallel=fsdp 2ranks",
    "fsdp_resumed": "head=kme trainer.parallel=fsdp trainer.micro_batch=3 2ranks resumed",
    "fsdp_offload": "trainer.parallel=fsdp trainer.fsdp.offload=true trainer.fsdp.reshard=false 2ranks",
    "fsdp_average": f"trainer.parallel=fsdp average=ema average.half_life_steps=5 {VALIDATED} 2ranks used",
    "sharded_checkpoints": "trainer.checkpoint_format=sharded 2ranks resumed",
    "sharded_state": (
        "head=cosine objective=nuclr objective.frozen_epochs=0 trainer.sample_state=sharded 2ranks resumed"
    ),
    # Tuning.
    "lora": "tune/image=lora tune/text=lora tune.text.rank=2 used",
    "lora_resumed": "head=wpse tune/image=lora tune.image.targets=['*attn*'] 2ranks resumed",
    "locked": "tune/image=frozen",
    "locked_computed": "head=wpse tune/image=frozen tune.image.cache_gigabytes=0 2ranks",
    "locked_both": "tune/image=frozen tune/text=frozen",
    "last_layers": "tune/image=last_k tune/text=last_k tune.text.layers=2 tune.text.layer_decay=0.5",
    "rates": "tune.image.rate=0.1 tune.text.layer_decay=0.5 tune.head_rate=2 tune.head_steps=5",
    # Averages of weights.
    "ema": "average=ema average.half_life_steps=5 evaluated used",
    "ema_resumed": "head=wpse average=ema average.half_life_epochs=1 2ranks resumed",
    "swa": "average=swa average.start_share=0.5 average.every_steps=2 evaluated",
    "swa_resumed": "average=swa average.start_steps=6 resumed",
    # Validation.
    "validated": VALIDATED,
    "validated_2ranks": f"head=wpse {VALIDATED} trainer.best_metric=validation/loss trainer.keep=1 2ranks",
    "validated_best": f"{VALIDATED} trainer.best_metric=validation/loss optim.schedule.peak=0.1",
    "validated_resumed": f"head=cosine objective=sogclr {VALIDATED} trainer.best_metric=validation/loss resumed",
    "validated_patience": f"{VALIDATED} trainer.best_metric=validation/loss trainer.patience=1 optim.schedule.peak=0.5",
    "validated_captions": f"{VALIDATED} eval.caption_key=long eval.at_start=true",
    "evaluated_at_start": "evaluated eval.at_start=true eval.keep_features=true",
    # Captions.
    "captions_whole": "trainer.group_captions=false",
    "captions_grouped_micro_batch": "trainer.micro_batch=3 trainer.group_captions=true 2ranks",
    "captions_key_grouped": f"data.shards={PHOTOS} data.caption_key=long encoder.context_length=32",
    # Optimisers and schedules.
    "adafactor": "optim=adafactor",
    "muon": "optim=muon 2ranks",
    "muon_resumed": "optim=muon resumed",
    "sgd": "optim=sgd",
    "lion": "optim=timm optim.name=lion",
    "wsd": "optim/schedule=wsd optim.schedule.cooldown_shape=sqrt",
    "inverse_sqrt": "optim/schedule=inverse_sqrt optim.schedule.cooldown_steps=5",
    "linear": "optim/schedule=linear",
    "constant": "optim/schedule=constant",
    # Spikes.
    "spikes_reported": "trainer.on_spike=report trainer.spike_threshold=1 trainer.spike_window=5",
    "spikes_skipped": "trainer.on_spike=skip trainer.spike_threshold=3 trainer.spike_window=10 2ranks",
    "spikes_rewound": "trainer.on_spike=rewind trainer.spike_threshold=6 trainer.spike_window=10",
    "spikes_stopped": "trainer.on_spike=stop trainer.spike_threshold=1 trainer.spike_window=5",
    # Initial weights and continued runs.
    "initial_weights": "trainer.steps=5 then init.weights=runs/variants/initial_weights/first",
    "initial_image": "trainer.steps=5 then head=wpse init.image=runs/variants/initial_image/first tune/image=frozen",
    "continued": (
        "trainer.steps=12 optim/schedule=constant then optim/schedule=wsd optim.schedule.cooldown_steps=5 "
        "init.resume=runs/variants/continued/first"
    ),
    # Loggers and profiles.
    "tensorboard": "logger.tensorboard=true",
    "profiled": "trainer.profile=[3,5]",
    # Run directories used afterwards.
    "used_clip": "head=clip used",
    "used_wpse": "head=wpse used",
    "used_kme": "head=kme evaluated used",
    "used_cloob": "head=cloob objective=infoloob used",
    "used_cosine": "head=cosine objective=sogclr used",
    # Paths of the command line.
    "experiment_name": "experiment=cloob/cc3m_cloob encoder=tiny eval=none optim.schedule.warmup_steps=null",
    "given_name": "name=given",
}
"""Name -> overrides after BASE, and words of WORDS: 2ranks, resumed, used as in Case; evaluated adds EVALUATED.

Overrides before " then " are those of a run before it, named first.
"""


def configurations(checkout: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Name and overrides of every configuration: experiments in all scales, options of groups, searches, studies."""
    for experiment in _options(checkout, "experiment"):
        for scale in _options(checkout, "scale"):
            yield "train", (f"experiment={experiment}", f"scale={scale}")
    for group in ("encoder", "head", "objective", "data", "eval", "optim", "trainer", "logger", "search", "tune"):
        for option in _options(checkout, group):
            yield "train", (f"{group}={option}",) if group == "encoder" else ("encoder=tiny", f"{group}={option}")
    for kernel in _options(checkout, "head/kernel"):
        yield "train", ("head=wpse", f"head/kernel={kernel}")
    for study in _options(checkout, "study"):
        yield "studies", (f"study={study}",)
    for option in _options(checkout, "eval"):
        yield "eval", (f"eval={option}", "+encoder={image_size:224,tokenizer:none}")


def _options(checkout: Path, group: str) -> list[str]:
    """The options of a group of conf/; experiments are in folders."""
    folder = checkout / "conf" / group
    paths = folder.glob("**/*.yaml" if group == "experiment" else "*.yaml")
    return sorted(str(path.relative_to(folder).with_suffix("")) for path in paths if not path.stem.startswith("_"))
