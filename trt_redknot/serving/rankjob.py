"""The ranks of a service as a child: mpirun, a socket to every rank, and nothing left of them at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from trt_redknot.errors import RedKnotError
from trt_redknot.launch import mpirun_command, mpirun_environment, session_folder
from trt_redknot.leftovers import remove_leftovers
from trt_redknot.serving.config import ServingConfig
from trt_redknot.serving.socket import Channel, ChannelError, Listener, readable

_POLL_S = 0.2
# Seconds that mpirun gets to end its ranks when it is asked to.
_TERMINATE_S = 5.0

OnMessage = Callable[[int, dict[str, Any]], None]
OnEnd = Callable[[str], None]


class RankJob:
    """One mpirun of ours. Start one with :meth:`start`.

    Args:
        on_message: gets what a rank sends, in a thread of that rank's own.
        on_end: gets why, whenever a rank or mpirun is gone; more than once.
    """

    def __init__(
        self, config: ServingConfig, listener: Listener, process: subprocess.Popen[bytes],
        session: tempfile.TemporaryDirectory[str], on_message: OnMessage, on_end: OnEnd,
    ) -> None:  # fmt: skip
        self._config = config
        self._session = session
        self._listener = listener
        self._process = process
        self._on_message = on_message
        self._on_end = on_end
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._ranks: dict[int, Channel] = {}
        self._handles: dict[int, int] = {}

    @classmethod
    def start(
        cls, config: ServingConfig, environment: Mapping[str, str] | None, on_message: OnMessage, on_end: OnEnd
    ) -> RankJob:
        """Start `config.world_size` ranks; they connect once :meth:`follow` is called, and get the configuration.

        Args:
            environment: of the ranks; left out: this process's.

        Raises:
            LaunchError, ChannelError, OSError: there is no mpirun, or no socket can be made.
        """
        listener = Listener()
        session = tempfile.TemporaryDirectory(prefix="redknot-mpi-", ignore_cleanup_errors=True)
        try:
            command = mpirun_command(
                config.world_size, ["-m", "trt_redknot.serving", "rank", "--socket", str(listener.path)]
            )
            variables = mpirun_environment(environment) | session_folder(session.name)
            process = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, start_new_session=True)
        except (RedKnotError, OSError):
            listener.close()
            session.cleanup()
            raise
        return cls(config, listener, process, session, on_message, on_end)

    def follow(self) -> None:
        """Begin to take connections and to tell what happens. Until then nothing is called back."""
        threading.Thread(target=self._accept, daemon=True).start()
        threading.Thread(target=self._await_end, daemon=True).start()

    @property
    def processes(self) -> tuple[int, ...]:
        """mpirun, then the ranks that have connected."""
        with self._lock:
            return (self._process.pid, *(channel.peer[0] for _, channel in sorted(self._ranks.items())))

    def send(self, message: Mapping[str, object]) -> None:
        """To rank 0. Raises ChannelError where it is gone, or the message is too large for one."""
        with self._lock:
            channel = self._ranks.get(0)
        if channel is None:
            raise ChannelError("rank 0 is not connected")
        channel.send(message)

    def stop(self, patience_s: float) -> None:
        """End mpirun and every rank: wait `patience_s`, ask, insist. mpirun's ranks are in sessions of their own."""
        killed = False
        for action, wait_s in ((None, patience_s), (signal.SIGTERM, _TERMINATE_S), (signal.SIGKILL, _TERMINATE_S)):
            if action is not None and self._process.poll() is None:
                killed = action is signal.SIGKILL
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, action)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
                break
        self._stopped.set()
        with self._lock:
            handles, self._handles = list(self._handles.values()), {}
            channels = list(self._ranks.values())
        for handle in handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                readable(handle, _TERMINATE_S)
            os.close(handle)
        if killed:
            # mpirun had no time to remove what its ranks had in shared memory.
            remove_leftovers()
        for channel in channels:
            channel.close()
        self._listener.close()
        self._session.cleanup()

    def _accept(self) -> None:
        while not self._stopped.is_set() and len(self._ranks) < self._config.world_size:
            try:
                channel = self._listener.accept(_POLL_S)
            except ChannelError:
                return
            if channel is not None:
                threading.Thread(target=self._follow, args=(channel,), daemon=True).start()
        # Nobody else is to come, and what lies in the file system would outlive a process that is killed.
        self._listener.close()

    def _follow(self, channel: Channel) -> None:
        """Read one rank's connection to its end."""
        rank: int | None = None
        try:
            rank = self._welcome(channel)
            while (message := channel.receive()) is not None:
                self._on_message(rank, message)
            reason = "its process ended"
        except (ChannelError, ValueError, KeyError, TypeError, OSError) as error:
            reason = str(error)
        self._on_end(f"rank {'unknown' if rank is None else rank} is gone: {reason}")
        channel.close()

    def _welcome(self, channel: Channel) -> int:
        hello = channel.receive()
        if hello is None or hello.get("op") != "hello" or type(hello.get("rank")) is not int:
            raise ChannelError("a process connected that is no rank", found=hello)
        rank, size = int(hello["rank"]), self._config.world_size
        if hello["size"] != size:
            raise ChannelError("mpirun started another number of ranks", expected=size, found=hello["size"])
        # A number may be given to another process once this one is gone; a handle is not.
        handle = os.pidfd_open(channel.peer[0])
        with self._lock:
            known = rank in self._ranks or not 0 <= rank < size or self._stopped.is_set()
            if not known:
                self._ranks[rank], self._handles[rank] = channel, handle
        if known:
            os.close(handle)
            raise ChannelError("a process connected that is no rank", found=hello)
        channel.send({"op": "config", "config": self._config.model_dump(mode="json")})
        return rank

    def _await_end(self) -> None:
        code = self._process.wait()
        # A rank's own words, which are in its socket, say more than the status of the job.
        time.sleep(_POLL_S)
        self._on_end(f"the ranks' job ended with status {code}")
