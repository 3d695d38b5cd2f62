"""``torchemo serve``: a page on this machine where images are dragged into classes and sorted."""

import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, final

import tyro

from torchemo.core.errors import ConfigError, ResourceError
from torchemo.report.terminal import print_json

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@final
@dataclass(frozen=True)
class ServeCommand:
    """Open a page on this machine that teaches a trained run new classes and sorts images by them."""

    run_folder: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]
    """Folder of the run; its own data are not needed."""
    host: str = "127.0.0.1"
    """Address to listen at. Only this machine can reach the default; others can reach any other one, and
    nothing is encrypted."""
    port: int = 0
    """Port to listen at; 0 takes a free one."""
    step: int | None = None
    """Checkpoint to use; the best on validation tasks by default."""
    invert: bool = False
    """Swap dark and light: for runs on bright ink (Omniglot) and dark ink in the images."""
    open_browser: bool = False
    """Open the page in the browser."""
    json: bool = False
    """Print the address as a JSON object."""

    def run(self) -> int:
        """Run the command."""
        try:
            from torchemo.apps.web.app import serve
        except ImportError as error:
            raise ConfigError(
                f"the page needs what is not installed: {error.name}.",
                hint="Install it with: pip install 'torchemo[web]'",
            ) from error
        import socket

        from torchemo.apps.web.answering import Answering
        from torchemo.runs.run import load

        answering = Answering(load(self.run_folder, step=self.step), invert=self.invert)
        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            listening = socket.create_server((self.host, self.port), family=family)
        except (OSError, OverflowError) as error:
            raise ResourceError(
                f"cannot listen at {self.host}, port {self.port} ({error}).",
                hint="Choose another --port, or 0 for a free one.",
            ) from error
        token = secrets.token_urlsafe(16)
        host = f"[{self.host}]" if ":" in self.host else self.host
        address = f"http://{host}:{listening.getsockname()[1]}/{token}/"
        if self.json:
            print_json({"method": answering.about["method"], "address": address})
        else:
            print(f"{answering.about['method']} answers at {address}")
            print("Ctrl-C ends it; what is on the page is then gone unless it was saved.")
        # Whoever started this command may read its address from a pipe, and it never ends by itself.
        sys.stdout.flush()
        if self.open_browser:
            import webbrowser

            webbrowser.open(address)
        serve(answering, listening, token=token, anywhere=self.host not in LOOPBACK)
        return 0
