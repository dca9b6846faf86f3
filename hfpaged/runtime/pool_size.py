"""How many blocks a pool gets: from an option, or from the memory that is free."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from hfpaged.config import EngineConfig
from hfpaged.errors import ConfigError

GIB = 1 << 30
DEFAULT_SHARE_OF_FREE_MEMORY = 0.25
# A million tokens. Beyond that the books of an otherwise idle pool cost more than they could save.
MOST_DEFAULT_BLOCKS = 1 << 16


def pool_size(config: EngineConfig, device: torch.device, bytes_per_block: int) -> int:
    """Blocks of a pool: `num_blocks`, or what `kv_memory_gib` or by default a share of the free memory has room for.

    On the CPU the pool is reserved, not taken: the system commits a block's memory when it is first written.

    Args:
        device: where the pool will be.
        bytes_per_block: of all layers together.

    Raises:
        ConfigError: `kv_memory_gib` is less than one block.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_memory_gib is not None:
        blocks = int(config.kv_memory_gib * GIB // bytes_per_block)
        if blocks < 1:
            raise ConfigError(
                f"kv_memory_gib={config.kv_memory_gib} is less than one block ({bytes_per_block / GIB:.4f} GiB)"
            )
        return blocks
    has_own = device.type in ("cuda", "xpu")
    free = torch.get_device_module(device).mem_get_info(device)[0] if has_own else _free_host_memory()
    return max(1, min(MOST_DEFAULT_BLOCKS, int(free * DEFAULT_SHARE_OF_FREE_MEMORY) // bytes_per_block))


def _free_host_memory() -> int:
    """Bytes of memory that this process may still take: what the system has, or less if a cgroup (v1, v2) limits it."""
    free = psutil.virtual_memory().available
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = (Path(name).read_text().strip() for name in (limit_file, usage_file))
        except OSError:
            continue
        if limit.isdigit():
            free = min(free, max(0, int(limit) - int(used)))
    return free
