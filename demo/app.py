"""The demo as a script: `python demo/app.py` is `hfpaged demo`; `gradio demo/app.py` reloads it as its files change."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from hfpaged.cli import demo as command
    from hfpaged.errors import HfpagedError

    # Gradio runs this file again, in the same namespace, after each change. The model stays, and is patched again.
    is_reload = "loaded" in globals()
    args = command.parse(sys.argv[1:])
    try:
        command.require_gradio()
        if not is_reload:
            loaded = command.load_model(args)
        demo = command.build(args, *loaded)
        command.serve(args, demo)
    except HfpagedError as error:
        if is_reload:
            raise  # shown by Gradio, which goes on watching
        sys.exit(f"hfpaged: error: {error}")
