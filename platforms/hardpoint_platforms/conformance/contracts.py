"""Group `ops`: every sample of every contract that the device claims, against the reference.

Of each sample: supports() answers with a reason and twice alike, pack and build give what they should, the result has
the contract's form and is within its tolerance, nothing is changed that may not be, and a second call gives the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from hardpoint_platforms.conformance.checks import Check, Group, Measure
from hardpoint_platforms.conformance.comparison import Distance, require_close, require_near
from hardpoint_platforms.conformance.execution import Outcome, execute
from hardpoint_platforms.conformance.ladder import is_required, level_of
from hardpoint_platforms.conformance.subject import Subject, oracle
from hardpoint_platforms.device import Device
from hardpoint_platforms.ops.catalogue import CONTRACTS
from hardpoint_platforms.ops.contract import OpContract, Sample, Tolerance
from hardpoint_platforms.ops.provider import OpProvider
from hardpoint_platforms.reference.platform import ReferenceDevice

#: Their results are draws: group `sampling` judges them.
DRAWS = ("sample", "verify")
#: The level of products with quantized weights.
_QUANTIZED = "quantized linear"


def checks(subject: Subject) -> Iterator[Check]:
    """One check per sample and compute dtype."""
    dtypes = subject.device.capabilities().compute_dtypes
    seen: set[str] = set()
    for contract in CONTRACTS.values():
        if contract.name in DRAWS:
            continue
        for dtype in dtypes:
            if dtype not in contract.tolerance:
                continue
            for case in contract.samples(dtype):
                check = _check(contract, case, first=case.instance.dtype is dtypes[0])
                if check.id not in seen:
                    seen.add(check.id)
                    yield check


def _check(contract: OpContract, case: Sample, first: bool) -> Check:
    name = contract.name
    quantized = is_quantized(case)
    if quantized and name == "linear":
        name = _QUANTIZED
    fixed = contract.name == "logprobs"  # float32 whatever the model computes in
    return Check(
        group="quantized" if quantized else "ops",
        contract=name,
        name=case.instance.where,
        level=max(level_of(_QUANTIZED), level_of(name)) if quantized else level_of(name),
        body=partial(_run, contract, case),
        dtype=short(case.instance.dtype),
        phase=phase_of(case.instance.where),
        required=is_required(name) and (first or fixed) and (not quantized or name == _QUANTIZED),
    )


def _run(contract: OpContract, case: Sample, subject: Subject, seed: int) -> Measure:
    provider = subject.claim(case.instance)
    return compare(subject.device, provider, case, contract.tolerance[case.instance.dtype])


def compare(device: Device, provider: OpProvider, case: Sample, tolerance: Tolerance) -> Measure:
    """Run a sample twice on the device and twice on the reference; the second calls are timed."""
    theirs = oracle(case.instance.op)
    host = ReferenceDevice()
    wanted, again = execute(host, theirs, case), execute(host, theirs, case)
    first = execute(device, provider, case)
    distance = judge(case, first, wanted, tolerance)
    second = execute(device, provider, case)
    distance = distance.worse(judge(case, second, wanted, tolerance))
    return Measure(
        error=distance.error,
        tolerance=distance.tolerance,
        seconds=second.seconds,
        reference_seconds=again.seconds,
    )


def judge(case: Sample, found: Outcome, wanted: Outcome, tolerance: Tolerance) -> Distance:
    """Results by tolerance (by length for quantized weights), pages by tolerance."""
    if is_quantized(case) and not found.pages:
        return require_near(found.result, wanted.result, found.kernel)
    distance = require_close(found.result, wanted.result, tolerance, found.kernel)
    return distance.worse(require_close(found.pages, wanted.pages, tolerance, found.kernel, "the state after it"))


def is_quantized(case: Sample) -> bool:
    """Whether a weight of the sample is quantized."""
    return any(spec.scheme is not None for spec in case.instance.weights.values())


def short(dtype: torch.dtype) -> str:
    """ "bfloat16" of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def phase_of(where: str) -> str:
    """The phase that a sample's name tells; empty for ops that have none."""
    for word, phase in (("mixed", "mixed"), ("chunk", "chunked"), ("continued", "chunked"), ("decode", "decode")):
        if word in where:
            return phase
    return "prefill" if "prefill" in where else ""


GROUP = Group("ops", "op contracts over their samples", checks, beside=True)
