"""Things that this plugin does wrong when it is told to, so that the checks of its kernels can be checked.

Each is one line at the place where such a mistake is made, found by its name: `fault == "mask_off_by_one"`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hardpoint_platforms.errors import PlatformError

VARIABLE = "ACME_NPU_FAULT"
FAULTS: Mapping[str, str] = {
    "mask_off_by_one": "a query sees the key behind it",
    "stale_page_table": "a replayed program reads the page tables that it was recorded with",
    "slot_off_by_one": "new keys and values are stored one token too far",
    "half_softmax": "attention weights are computed in float16",
    "padding_leaks": "keys of padded rows are stored in page 1",
    "rng_per_batch": "every request draws with the first one's seed",
    "oom_swallowed": "an allocation that does not fit gives a tensor all the same",
    "memory_leaks": "memory that was freed stays reserved",
    "wrong_dtype": "norm returns float64",
    "wrong_shape": "logits lack the last token",
    "kernel_raises": "rope fails with an error of its own",
    "kernel_hangs": "gated_activation never returns",
    "claims_page_size": "pages of 24 tokens are offered, though the kernels shift and mask",
    "claims_dtype": "float16 is offered, though no linear kernel takes it",
    "missing_method": "the rope provider has no build()",
    "wrong_signature": "the norm provider's supports() takes no instance",
    "permuted_heads": "export_pages() gives the heads in reverse",
    "neighbour_scale": "4-bit weights are scaled as the next group is",
    "results_die": "a program's results are overwritten by its next run",
}


def chosen_fault(options: Mapping[str, Any]) -> str:
    """The fault that the options or the environment ask for, "" for none. Raises PlatformError for an unknown one."""
    name = str(options.get("fault") or os.environ.get(VARIABLE, ""))
    if name and name not in FAULTS:
        raise PlatformError(f"{VARIABLE}={name}: there is no such fault", hint="known are " + ", ".join(FAULTS))
    return name
