"""The engine's process: `python -m hfpaged.serving.process.worker`, started by `EngineClient` and by nobody else.

It ends when its client does, however that ends: standard input is a pipe whose other end only the client holds.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

import hfpaged
from hfpaged.generation.engine import Engine
from hfpaged.generation.prompts import output_size
from hfpaged.models.end_tokens import end_tokens
from hfpaged.models.load_progress import weights_progress
from hfpaged.models.loading import load_model, set_threads
from hfpaged.serving.process.core_loop import CoreLoop
from hfpaged.serving.process.faults import fault_of
from hfpaged.serving.process.messages import Fatal, Loading, ModelInfo, Ready, encode
from hfpaged.serving.process.settings import CoreSettings
from hfpaged.serving.process.transport import EngineSockets

logger = logging.getLogger(__name__)

LINGER_SECONDS = 1.0
# How long one thread may keep Python to itself. The loop and the stepping thread share a process, and the default of
# 5 ms is as long as a step.
SWITCH_SECONDS = 0.0005
SAMPLING_DEFAULTS = ("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


def main() -> int:
    """Load, serve, end. Returns the exit code: 0 if told to end, 1 after an error, which has been reported."""
    settings = CoreSettings.from_line(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_client, args=(settings,), name="hfpaged-parent", daemon=True).start()
    # Ctrl-C goes to the whole foreground group; the client decides what becomes of this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_SECONDS)
    if settings.cpus is not None:
        os.sched_setaffinity(0, settings.cpus)
    sockets = EngineSockets(settings.addresses)
    try:
        sockets.reports.send(encode(Loading("starting", 1.0)))
        model, info = _load(settings, lambda stage, fraction: sockets.reports.send(encode(Loading(stage, fraction))))
        sockets.reports.send(encode(Ready(info)))
        CoreLoop(hfpaged.engine(model), sockets, settings.parent).run()
    except Exception as error:  # the client tells everybody who waits
        logger.exception("hfpaged: the engine's process ends")
        sockets.reports.send(encode(Fatal(fault_of(error))))
        sockets.close(LINGER_SECONDS)
        return 1
    sockets.close(0)
    return 0


def _end_with_client(settings: CoreSettings) -> None:
    while os.read(0, 1024):
        continue
    if settings.addresses.directory is not None:
        shutil.rmtree(settings.addresses.directory, ignore_errors=True)
    # Not sys.exit: whatever this process is doing, nobody is interested any more.
    os._exit(0)


def _load(settings: CoreSettings, report: Callable[[str, float], None]) -> tuple[PreTrainedModel, ModelInfo]:
    # It warns about options of single requests, which are answered, not logged.
    transformers.logging.set_verbosity_error()
    set_threads(settings.threads)
    report("loading weights", 0.0)
    with weights_progress(lambda fraction: report("loading weights", fraction)):
        model, _ = load_model(settings.model, settings.dtype)
    model.patch(**settings.engine_options)
    report("warming up", 0.0)
    engine = hfpaged.engine(model)
    engine.warm_up()
    report("warming up", 1.0)
    return model, _model_info(model, engine)


def _model_info(model: PreTrainedModel, engine: Engine) -> ModelInfo:
    stats = engine.stats()
    return ModelInfo(
        model_type=model.config.model_type,
        dtype=str(model.dtype).removeprefix("torch."),
        vocab_size=model.get_input_embeddings().num_embeddings,
        output_size=output_size(model),
        max_length=getattr(model.config, "max_position_embeddings", None),
        block_size=stats["block_size"],
        num_blocks=stats["blocks_total"],
        eos_token_ids=list(end_tokens(model)),
        defaults=_sampling_defaults(model.generation_config),
    )


def _sampling_defaults(config: GenerationConfig) -> dict[str, float | bool | None]:
    values = {name: getattr(config, name, None) for name in SAMPLING_DEFAULTS}
    return {name: value for name, value in values.items() if value is not None}


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
