"""What a model's file says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelMetadata:
    """Facts about the model file, under onnxruntime's names (`get_modelmeta`) and ONNX's own."""

    producer_name: str = ""
    producer_version: str = ""
    domain: str = ""
    version: int = 0
    description: str = ""
    graph_name: str = ""
    graph_description: str = ""
    custom_metadata_map: Mapping[str, str] = field(default_factory=dict)
    ir_version: int = 0

    @property
    def model_version(self) -> int:
        """ModelProto.model_version."""
        return self.version

    @property
    def doc_string(self) -> str:
        """ModelProto.doc_string."""
        return self.description

    @property
    def metadata_props(self) -> Mapping[str, str]:
        """ModelProto.metadata_props."""
        return self.custom_metadata_map
