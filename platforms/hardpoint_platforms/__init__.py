"""The device interface of Hardpoint: what a chip needs to serve large language models.

The public names. Each is loaded when it is first asked for, so that importing this package imports neither torch nor a
plugin; `__init__.pyi` lists the same names for type checkers.
"""

import importlib
from typing import Any

_MODULES = {
    "batch": "AttentionBatch LogitBias Logprobs Penalties SampleResult SamplingInputs VerifyResult",
    "binding": "Binding BoundOp OpTable Refusal",
    "capabilities": "BatchLimits Capabilities ExecutionMode TuningChoice",
    "communication": "TENSOR_AXIS Communicator Mesh",
    "device": "Device DeviceInfo MemoryInfo",
    "errors": "DeviceLost DeviceUnavailable HardpointError OutOfDeviceMemory PlatformError PluginError "
    "UnsupportedOperation",
    "hookspecs": "hookimpl",
    "kv_transfer": "HostTransfer KVTransfer",
    "ops.contract": "Altitude Attribute Kernel OpContract OpInstance Packed Sample Tolerance Weight WeightSpec",
    "ops.catalogue": "CONTRACTS",
    "ops.provider": "AttentionPlanner OpProvider Support",
    "ops.table": "op_table",
    "platform": "Platform ProbeResult",
    "program": "Bucket EagerBuilder Footprint Program ProgramBuilder SamplingShape StepInputs StepOutputs",
    "quant": "Codes Packing QuantScheme QuantTensor Rounding",
    "reference.providers": "reference_providers",
    "state_cache": "CacheGroup CacheLayout CanonicalPages DenseStateCache LayerCache State StateCache",
    "streams": "Clock Event Readback Stream",
    "versioning": "INTERFACES Version VersionRange",
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
