"""What the user asks for: frozen models, YAML in, and where each value came from."""

from cgplan.config.load import LoadedConfig, load_config, read_config, validate_config
from cgplan.config.schema import (
    CompilationConfig,
    Config,
    Input,
    LoRAConfig,
    ModelConfig,
    ReportConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from cgplan.config.shapes import Dim

__all__ = [
    "CompilationConfig",
    "Config",
    "Dim",
    "Input",
    "LoRAConfig",
    "LoadedConfig",
    "ModelConfig",
    "ReportConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
    "load_config",
    "read_config",
    "validate_config",
]
