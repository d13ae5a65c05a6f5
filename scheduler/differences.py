"""Names that onnxruntime has and Outrider does not, each with the reason.

`docs/differences.md` is made of this list, and a test compares it with the onnxruntime that is installed: each public
name is either here or there. Whoever asks for such a name gets NoSuchNameError with the reason, an AttributeError, so
that `hasattr` is False.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.scheduler.errors import NoSuchNameError

PAGE = "docs/differences.md"

_DEVICES = "values lie in host memory, which workers share; there is no device memory to name"
_EPS = "execution providers are loaded by workers, not into this process: name them in `providers=`"
_COMPILED = "models are not compiled ahead of time or packaged"
_LORA = "adapters are not loaded"
_SPARSE = "there are no sparse tensors"
_VECTORS = "lists of OrtValues serve: run_with_ort_values, IOBinding.get_outputs"
_GIVEN = "the model is taken as its file says; onnx changes it before that"
_TUNING = "nothing is tuned at run time"

ABSENT: dict[str, dict[str, str]] = {
    "onnxruntime": {
        "AdapterFormat": _LORA,
        "LoraAdapter": _LORA,
        "ModelCompiler": _COMPILED,
        "OrtCompileApiFlags": _COMPILED,
        "ModelPackage": _COMPILED,
        "ModelPackageComponentContext": _COMPILED,
        "ModelPackageContext": _COMPILED,
        "ModelPackageOptions": _COMPILED,
        "ModelPackageWriteMode": _COMPILED,
        "OrtEpContextData": _COMPILED,
        "OrtEpContextDataBuffer": _COMPILED,
        "OrtExternalInitializerInfo": _COMPILED,
        "OrtAllocatorType": _DEVICES,
        "OrtArenaCfg": _DEVICES,
        "OrtDevice": _DEVICES,
        "OrtDeviceMemoryType": _DEVICES,
        "OrtDeviceVendorId": _DEVICES,
        "OrtMemType": _DEVICES,
        "OrtMemoryInfo": _DEVICES,
        "OrtMemoryInfoDeviceType": _DEVICES,
        "OrtSyncStream": _DEVICES,
        "SessionIOBinding": "it is IOBinding",
        "copy_tensors": _DEVICES,
        "create_and_register_allocator": _DEVICES,
        "create_and_register_allocator_v2": _DEVICES,
        "OrtEpAssignedNode": "session.placement() tells which provider has which node",
        "OrtEpAssignedSubgraph": "session.placement() tells which provider has which node",
        "OrtEpDevice": _EPS,
        "OrtExecutionProviderDevicePolicy": _EPS,
        "OrtHardwareDevice": _EPS,
        "OrtHardwareDeviceType": _EPS,
        "get_ep_devices": _EPS,
        "register_execution_provider_library": "a worker registers it: `ort?library=/x/libep.so&registration=name`",
        "unregister_execution_provider_library": "it goes with its worker",
        "preload_dlls": "workers load libraries of devices: ProviderSpec(env=...) says where they are",
        "cuda_version": "Outrider is not built for a version of CUDA",
        "package_name": "Outrider is one package",
        "version": "it is `__version__`",
        "print_debug_info": "`outrider doctor` prints it",
        "OrtSparseFormat": _SPARSE,
        "SparseTensor": _SPARSE,
        "capi": "it is onnxruntime's inside; errors are in `outrider.errors`",
        "contextlib": "it is Python's",
        "import_capi_exception": "it is onnxruntime's inside",
        "onnxruntime_validation": "it is onnxruntime's inside",
        "enable_telemetry_events": "there are none",
        "has_collective_ops": "there are none",
        "set_default_logger_callback": "add a handler to the logger 'outrider' of Python's logging",
        "set_global_thread_pool_sizes": "each worker has threads of its own: ProviderSpec(threads=...)",
        "set_seed": "random nodes draw in their workers: set their attribute `seed` in the model",
    },
    "InferenceSession": {
        "get_input_epdevices": _DEVICES,
        "get_input_memory_infos": _DEVICES,
        "get_output_memory_infos": _DEVICES,
        "get_profiling_start_time_ns": "times in the file are those of CLOCK_MONOTONIC",
        "get_provider_graph_assignment_info": "session.placement() tells which provider has which node",
        "get_tuning_results": _TUNING,
        "set_tuning_results": _TUNING,
        "release_captured_graph": "no graphs of a device are captured",
        "run_with_ortvaluevector": _VECTORS,
        "set_ep_dynamic_options": "options of a provider are set when its worker starts",
    },
    "SessionOptions": {
        "add_external_initializers": _GIVEN,
        "add_external_initializers_from_files_in_memory": _GIVEN,
        "add_initializer": _GIVEN,
        "add_free_dimension_override_by_denotation": "use add_free_dimension_override_by_name",
        "add_provider": "providers are the session's argument `providers=`",
        "add_provider_for_devices": "providers are the session's argument `providers=`",
        "has_providers": "providers are the session's argument `providers=`",
        "set_provider_selection_policy": "providers are the session's argument `providers=`",
        "set_provider_selection_policy_delegate": "providers are the session's argument `providers=`",
        "register_custom_ops_library": "a worker loads it: `ort?custom_ops=/x/libops.so`",
        "set_ep_context_data_read_func": _COMPILED,
        "clear_ep_context_data_read_func": _COMPILED,
        "set_load_cancellation_flag": "`load_deadline` bounds a load",
    },
    "RunOptions": {
        "add_active_adapter": _LORA,
    },
    "OrtValue": {
        "as_sparse_tensor": _SPARSE,
        "ort_value_from_sparse_tensor": _SPARSE,
    },
    "IOBinding": {
        "get_outputs_as_ortvaluevector": _VECTORS,
    },
    "NodeArg": {},
    "ModelMetadata": {},
}


def no_such_name(where: str, name: str, otherwise: str, owner: Any = None) -> AttributeError:
    """The error for a name that `where`, a class or module, does not have; `otherwise`: if it is in no list."""
    reason = ABSENT.get(where, {}).get(name)
    if reason is None:
        return AttributeError(otherwise, name=name, obj=owner)
    of = "Outrider" if where == "onnxruntime" else f"Outrider's {where}"
    message = f"{of} has no {name!r}, as onnxruntime has: {reason}. {PAGE} lists all differences."
    return NoSuchNameError(message, option=name if where == "onnxruntime" else f"{where}.{name}", reason=reason)


class Explained:
    """A class whose absent names are explained."""

    __slots__ = ()

    if not TYPE_CHECKING:  # a misspelt name is an error for a type checker too

        def __getattr__(self, name: str) -> Any:
            where = next((kind.__name__ for kind in type(self).__mro__ if kind.__name__ in ABSENT), "")
            raise no_such_name(where, name, f"{type(self).__name__!r} object has no attribute {name!r}", self)
