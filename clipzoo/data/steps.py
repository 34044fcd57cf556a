"""What a loader process computes: one rank's rows of a step."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

from clipzoo.data.plan.plan import Plan
from clipzoo.data.samples import SampleReader
from clipzoo.data.shards.faults import Finding
from clipzoo.data.tokenizer import Tokenizer, trimmed
from clipzoo.errors import ConfigError
from clipzoo.types import Batch


class Steps(Dataset):
    """Step -> (Batch, findings, failure): a worker's task. A failure is a value, raised where it can be seen."""

    def __init__(self, plan: Plan, reader: SampleReader, tokenizer: Tokenizer, mine: slice, trim_text: bool) -> None:
        self._plan, self._reader, self._tokenizer, self._mine, self._trim = plan, reader, tokenizer, mine, trim_text

    def __getitem__(self, step: int) -> tuple[Batch | None, list[Finding], str | None]:
        rows = self._plan.rows(step)
        ids, epochs = rows.sample_id[self._mine], rows.epoch[self._mine]
        images: torch.Tensor | None = None
        captions: list[str] = []
        findings: list[Finding] = []
        for position, (sample_id, epoch) in enumerate(zip(ids.tolist(), epochs.tolist(), strict=True)):
            try:
                row = self._reader.row(sample_id, epoch)
            except ConfigError as error:
                return None, findings, str(error)
            if images is None:
                images = torch.empty(len(ids), *row.image.shape, dtype=torch.uint8)
            images[position] = row.image
            captions.append(row.caption)
            findings += row.findings
        assert images is not None
        text = self._tokenizer(captions)
        if self._trim:
            text = trimmed(text, self._tokenizer.end_token)
        return Batch(images, text, torch.from_numpy(ids.copy())), findings, None
