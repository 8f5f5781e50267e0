"""The configuration: frozen models, read from YAML, with the origin of each value."""

from cgplan.config.load import (
    LoadedConfig,
    Override,
    load_config,
    loaded_config,
    read_config,
    validate_config,
)
from cgplan.config.schema import (
    BudgetConfig,
    CompilationConfig,
    Config,
    Dim,
    DistributedConfig,
    Extent,
    Input,
    LoRAConfig,
    ModelConfig,
    ReportConfig,
    SchedulerConfig,
    SpeculativeConfig,
    TrafficConfig,
)

__all__ = [
    "BudgetConfig",
    "CompilationConfig",
    "Config",
    "Dim",
    "DistributedConfig",
    "Extent",
    "Input",
    "LoRAConfig",
    "LoadedConfig",
    "ModelConfig",
    "Override",
    "ReportConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
    "TrafficConfig",
    "load_config",
    "loaded_config",
    "read_config",
    "validate_config",
]
