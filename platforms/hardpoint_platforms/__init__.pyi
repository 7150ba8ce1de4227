"""The public names, for type checkers; at run time they are loaded lazily."""

from hardpoint_platforms.batch import (
    AttentionBatch as AttentionBatch,
)
from hardpoint_platforms.batch import (
    LogitBias as LogitBias,
)
from hardpoint_platforms.batch import (
    Logprobs as Logprobs,
)
from hardpoint_platforms.batch import (
    Penalties as Penalties,
)
from hardpoint_platforms.batch import (
    SampleResult as SampleResult,
)
from hardpoint_platforms.batch import (
    SamplingInputs as SamplingInputs,
)
from hardpoint_platforms.batch import (
    VerifyResult as VerifyResult,
)
from hardpoint_platforms.binding import (
    Binding as Binding,
)
from hardpoint_platforms.binding import (
    BoundOp as BoundOp,
)
from hardpoint_platforms.binding import (
    OpTable as OpTable,
)
from hardpoint_platforms.binding import (
    Refusal as Refusal,
)
from hardpoint_platforms.capabilities import (
    BatchLimits as BatchLimits,
)
from hardpoint_platforms.capabilities import (
    Capabilities as Capabilities,
)
from hardpoint_platforms.capabilities import (
    ExecutionMode as ExecutionMode,
)
from hardpoint_platforms.capabilities import (
    TuningChoice as TuningChoice,
)
from hardpoint_platforms.communication import (
    TENSOR_AXIS as TENSOR_AXIS,
)
from hardpoint_platforms.communication import (
    Communicator as Communicator,
)
from hardpoint_platforms.communication import (
    Mesh as Mesh,
)
from hardpoint_platforms.device import (
    Device as Device,
)
from hardpoint_platforms.device import (
    DeviceInfo as DeviceInfo,
)
from hardpoint_platforms.device import (
    MemoryInfo as MemoryInfo,
)
from hardpoint_platforms.errors import (
    DeviceLost as DeviceLost,
)
from hardpoint_platforms.errors import (
    DeviceUnavailable as DeviceUnavailable,
)
from hardpoint_platforms.errors import (
    HardpointError as HardpointError,
)
from hardpoint_platforms.errors import (
    OutOfDeviceMemory as OutOfDeviceMemory,
)
from hardpoint_platforms.errors import (
    PlatformError as PlatformError,
)
from hardpoint_platforms.errors import (
    PluginError as PluginError,
)
from hardpoint_platforms.errors import (
    UnsupportedOperation as UnsupportedOperation,
)
from hardpoint_platforms.hookspecs import (
    hookimpl as hookimpl,
)
from hardpoint_platforms.kv_transfer import (
    HostTransfer as HostTransfer,
)
from hardpoint_platforms.kv_transfer import (
    KVTransfer as KVTransfer,
)
from hardpoint_platforms.ops.catalogue import (
    CONTRACTS as CONTRACTS,
)
from hardpoint_platforms.ops.contract import (
    Altitude as Altitude,
)
from hardpoint_platforms.ops.contract import (
    Attribute as Attribute,
)
from hardpoint_platforms.ops.contract import (
    Kernel as Kernel,
)
from hardpoint_platforms.ops.contract import (
    OpContract as OpContract,
)
from hardpoint_platforms.ops.contract import (
    OpInstance as OpInstance,
)
from hardpoint_platforms.ops.contract import (
    Packed as Packed,
)
from hardpoint_platforms.ops.contract import (
    Sample as Sample,
)
from hardpoint_platforms.ops.contract import (
    Tolerance as Tolerance,
)
from hardpoint_platforms.ops.contract import (
    Weight as Weight,
)
from hardpoint_platforms.ops.contract import (
    WeightSpec as WeightSpec,
)
from hardpoint_platforms.ops.provider import (
    AttentionPlanner as AttentionPlanner,
)
from hardpoint_platforms.ops.provider import (
    OpProvider as OpProvider,
)
from hardpoint_platforms.ops.provider import (
    Support as Support,
)
from hardpoint_platforms.ops.table import (
    op_table as op_table,
)
from hardpoint_platforms.platform import (
    Platform as Platform,
)
from hardpoint_platforms.platform import (
    ProbeResult as ProbeResult,
)
from hardpoint_platforms.program import (
    Bucket as Bucket,
)
from hardpoint_platforms.program import (
    EagerBuilder as EagerBuilder,
)
from hardpoint_platforms.program import (
    Footprint as Footprint,
)
from hardpoint_platforms.program import (
    Program as Program,
)
from hardpoint_platforms.program import (
    ProgramBuilder as ProgramBuilder,
)
from hardpoint_platforms.program import (
    SamplingShape as SamplingShape,
)
from hardpoint_platforms.program import (
    StepInputs as StepInputs,
)
from hardpoint_platforms.program import (
    StepOutputs as StepOutputs,
)
from hardpoint_platforms.quant import (
    Codes as Codes,
)
from hardpoint_platforms.quant import (
    Packing as Packing,
)
from hardpoint_platforms.quant import (
    QuantScheme as QuantScheme,
)
from hardpoint_platforms.quant import (
    QuantTensor as QuantTensor,
)
from hardpoint_platforms.quant import (
    Rounding as Rounding,
)
from hardpoint_platforms.reference.providers import (
    reference_providers as reference_providers,
)
from hardpoint_platforms.state_cache import (
    CacheGroup as CacheGroup,
)
from hardpoint_platforms.state_cache import (
    CacheLayout as CacheLayout,
)
from hardpoint_platforms.state_cache import (
    CanonicalPages as CanonicalPages,
)
from hardpoint_platforms.state_cache import (
    DenseStateCache as DenseStateCache,
)
from hardpoint_platforms.state_cache import (
    LayerCache as LayerCache,
)
from hardpoint_platforms.state_cache import (
    State as State,
)
from hardpoint_platforms.state_cache import (
    StateCache as StateCache,
)
from hardpoint_platforms.streams import (
    Clock as Clock,
)
from hardpoint_platforms.streams import (
    Event as Event,
)
from hardpoint_platforms.streams import (
    Readback as Readback,
)
from hardpoint_platforms.streams import (
    Stream as Stream,
)
from hardpoint_platforms.versioning import (
    INTERFACES as INTERFACES,
)
from hardpoint_platforms.versioning import (
    Version as Version,
)
from hardpoint_platforms.versioning import (
    VersionRange as VersionRange,
)

__all__: list[str]
