"""Every op contract, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hardpoint_platforms.ops.activation import ACTIVATION, GATED_ACTIVATION
from hardpoint_platforms.ops.attention import ATTENTION
from hardpoint_platforms.ops.blocks import GATED_MLP, NORM_GATED_MLP, NORM_LINEAR
from hardpoint_platforms.ops.contract import OpContract
from hardpoint_platforms.ops.embedding import EMBEDDING
from hardpoint_platforms.ops.linear import LINEAR
from hardpoint_platforms.ops.logits import LOGITS
from hardpoint_platforms.ops.lora import LORA
from hardpoint_platforms.ops.mla import MLA_ATTENTION
from hardpoint_platforms.ops.moe import EXPERTS, MOE_ROUTE
from hardpoint_platforms.ops.norm import ADD_NORM, NORM
from hardpoint_platforms.ops.rotary import ROPE
from hardpoint_platforms.ops.rotary_attention import ROTARY_ATTENTION
from hardpoint_platforms.ops.sampling import LOGPROBS, SAMPLE, VERIFY
from hardpoint_platforms.ops.state_space import CONV_STATE, GATED_DELTA, SSM_SCAN

CONTRACTS: Mapping[str, OpContract] = MappingProxyType(
    {
        contract.name: contract
        for contract in (
            EMBEDDING,
            LINEAR,
            NORM,
            ADD_NORM,
            ROPE,
            ACTIVATION,
            GATED_ACTIVATION,
            GATED_MLP,
            NORM_LINEAR,
            NORM_GATED_MLP,
            ATTENTION,
            ROTARY_ATTENTION,
            MLA_ATTENTION,
            MOE_ROUTE,
            EXPERTS,
            LORA,
            CONV_STATE,
            SSM_SCAN,
            GATED_DELTA,
            LOGITS,
            SAMPLE,
            LOGPROBS,
            VERIFY,
        )
    }
)
