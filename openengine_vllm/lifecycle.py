"""The one owner of the process's state: starting, ready, draining, or not ready any more.

Services ask it whether they may go on; only the server moves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb

if TYPE_CHECKING:
    from openengine_vllm.engine.http import HttpFrontend
    from openengine_vllm.engine.runtime import Engine
    from openengine_vllm.kv_events.source import Publisher


@dataclass(frozen=True, slots=True)
class Serving:
    """What exists once the engine is up."""

    engine: Engine
    engine_info: pb.EngineInfo
    model_info: pb.ModelInfo
    has_chat_template: bool
    http: HttpFrontend | None = None
    """vLLM's own HTTP API, where it is to be served."""
    kv_publishers: tuple[Publisher, ...] = ()
    """Where KV events come from, by rank; none where they are off."""


class Lifecycle:
    """Current state, and the live engine once there is one."""

    def __init__(self) -> None:
        self._state: pb.HealthState.ValueType = pb.HEALTH_STATE_STARTING
        self._serving: Serving | None = None

    @property
    def state(self) -> pb.HealthState.ValueType:
        """STARTING, READY, DRAINING or NOT_READY."""
        return self._state

    @property
    def failed(self) -> bool:
        """Whether the engine has died, also where :meth:`fail` is still to be called."""
        engine_died = self._serving is not None and self._serving.engine.dead
        return engine_died or self._state == pb.HEALTH_STATE_NOT_READY

    @property
    def serving(self) -> Serving:
        """The live engine and what it is.

        Raises:
            OpenEngineError: the model is still loading, or the engine has died.
        """
        if self._state == pb.HEALTH_STATE_NOT_READY:
            raise errors.engine_dead()
        if self._serving is None or self._state == pb.HEALTH_STATE_STARTING:
            raise errors.starting()
        return self._serving

    @property
    def accepting(self) -> Serving:
        """As :attr:`serving`, for new work: raises DRAINING while the server drains."""
        if self._state == pb.HEALTH_STATE_DRAINING:
            raise errors.draining()
        return self.serving

    def ready(self, serving: Serving) -> None:
        """The engine has proven that it works."""
        self._serving = serving
        self._state = pb.HEALTH_STATE_READY

    def drain(self) -> None:
        """Take no more work; what runs may finish."""
        if self._state == pb.HEALTH_STATE_READY:
            self._state = pb.HEALTH_STATE_DRAINING

    def fail(self) -> None:
        """The engine is dead; nothing brings this process back."""
        self._state = pb.HEALTH_STATE_NOT_READY
