"""``torchemo serve``: a page on this machine where images are dragged into classes and sorted."""

import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, final

import tyro

from torchemo.config.machine import CPU_ALONE, Machine
from torchemo.core.errors import ConfigError, ResourceError
from torchemo.report.terminal import print_json, say

if TYPE_CHECKING:
    import socket

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
    remember: Path | None = None
    """Folder of a store of your own tasks; the page then recognises what comes back, and keeps a visit when
    you press Remember: gradients, class means, names and date, never an image."""
    open_browser: bool = False
    """Open the page in the browser."""
    machine: Machine = CPU_ALONE
    """Where to compute."""
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
        from torchemo.apps.web.answering import Answering
        from torchemo.apps.web.visits import Visits
        from torchemo.runs.run import load

        run = load(self.run_folder, step=self.step, **vars(self.machine))
        store = None if self.remember is None else Visits(run.trained, self.remember, run=run.root)
        answering = Answering(run, invert=self.invert, visits=store)
        listening = self._listening()
        token = secrets.token_urlsafe(16)
        host = f"[{self.host}]" if ":" in self.host else self.host
        address = f"http://{host}:{listening.getsockname()[1]}/{token}/"
        if self.json:
            print_json({"method": answering.about["method"], "address": address})
        else:
            say(f"{answering.about['method']} answers at {address}")
            if self.remember is not None:
                say(f"visits are kept in {self.remember} when you press Remember")
            say("Ctrl-C ends it; what is on the page is then gone unless it was saved.")
        # Whoever started this command may read its address from a pipe, and it never ends by itself.
        sys.stdout.flush()
        if self.open_browser:
            import webbrowser

            webbrowser.open(address)
        serve(answering, listening, token=token, anywhere=self.host not in LOOPBACK)
        return 0

    def _listening(self) -> "socket.socket":
        import socket

        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            return socket.create_server((self.host, self.port), family=family)
        except (OSError, OverflowError) as error:
            raise ResourceError(
                f"cannot listen at {self.host}, port {self.port} ({error}).",
                hint="Choose another --port, or 0 for a free one.",
            ) from error
