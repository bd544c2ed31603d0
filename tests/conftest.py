"""Eight simulated CPU devices for every test."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    # Halves the time to compile; what is compiled runs a few steps at most.
    + " --xla_backend_optimization_level=0"
    + " --xla_llvm_disable_expensive_passes=true"
)
