"""A step's batch as latent attention reads it: prompts with nothing cached before them apart from all other rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from hardpoint_platforms.batch import AttentionBatch
from hardpoint_torch_gpu.kernels.mla_expanded import Fresh
from hardpoint_torch_gpu.plan import GpuPlan, GpuPlanner, tiles


@dataclass(frozen=True, eq=False)
class LatentPlan(GpuPlan):
    """A plan with at least one such prompt. `rest`: the same without them; None where they are all there is."""

    fresh: Fresh
    rest: GpuPlan | None


class LatentPlanner(GpuPlanner):
    """Gives a `LatentPlan` where a step has such prompts, else a `GpuPlan`."""

    def plan(self, batch: AttentionBatch) -> GpuPlan:
        plan = super().plan(batch)
        counts = np.diff(batch.query_start[: batch.num_requests + 1])
        lengths = batch.sequence_lengths[: batch.num_requests]
        fresh = (counts > 1) & (counts == lengths)
        if not fresh.any():
            return plan
        parts = (*tiles(np.where(fresh, counts, 0), lengths), *tiles(np.where(fresh, 0, counts), lengths))
        sent = self._upload([torch.from_numpy(np.ascontiguousarray(part, np.int32)) for part in parts])
        rest = replace(plan, tile_rows=sent[2], tile_firsts=sent[3]) if len(plan.parts) or len(parts[2]) else None
        return LatentPlan(**vars(plan), fresh=Fresh(sent[0], sent[1], plan.starts), rest=rest)
