"""Health and Abort."""

from __future__ import annotations

from openengine_vllm.lifecycle import Lifecycle
from openengine_vllm.protocol import errors
from openengine_vllm.protocol import v1 as pb
from openengine_vllm.registry import EndReason, RequestRegistry
from openengine_vllm.services.handlers import Context
from openengine_vllm.services.probe import InferenceProbe

_MESSAGES = {
    pb.HEALTH_STATE_STARTING: "the model is loading",
    pb.HEALTH_STATE_READY: "",
    pb.HEALTH_STATE_DRAINING: "finishing what runs; no new work is taken",
    pb.HEALTH_STATE_NOT_READY: "the engine has died",
}


class ControlService:
    """The RPCs by which an operator or a router looks after the server."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        registry: RequestRegistry,
        probe: InferenceProbe,
        role: pb.EngineRole.ValueType,
    ) -> None:
        self._lifecycle = lifecycle
        self._registry = registry
        self._probe = probe
        self._role = role

    async def health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
        """Health; the inference probe runs only when it is asked for."""
        state = self._lifecycle.state
        if request.role not in (pb.ENGINE_ROLE_UNSPECIFIED, self._role):
            raise errors.role_mismatch("role", f"this engine's role is {_role_name(self._role)}")
        if request.model and state == pb.HEALTH_STATE_READY:
            self._check_model(request.model)
        engine_state = pb.HEALTH_STATE_READY if state == pb.HEALTH_STATE_DRAINING else state
        engine_message = _MESSAGES[engine_state]
        response = pb.HealthResponse(
            state=state,
            checks=[
                pb.HealthCheck(name="grpc", state=pb.HEALTH_STATE_READY, message=_MESSAGES[state]),
                pb.HealthCheck(name="scheduler", state=engine_state, message=engine_message),
                pb.HealthCheck(name="model", state=engine_state, message=engine_message),
                pb.HealthCheck(
                    name="role", state=pb.HEALTH_STATE_READY, message=_role_name(self._role)
                ),
            ],
        )
        if request.include_inference_probe:
            await self._add_probe(response)
        return response

    async def abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Abort one request, or all; an id is free again when the answer arrives."""
        _ = self._lifecycle.serving
        target = request.WhichOneof("target")
        if target == "request_id":
            return self._abort_one(request.request_id)
        if target == "all_requests":
            return self._abort_all()
        if target == "kv_session":
            raise errors.kv_session_not_found(request.kv_session.session_id)
        raise errors.invalid_argument(
            "target", "target is required: set request_id, kv_session or all_requests"
        )

    def _check_model(self, model: str) -> None:
        if model not in self._lifecycle.serving.engine.facts.served_names:
            raise errors.model_not_found(model)

    async def _add_probe(self, response: pb.HealthResponse) -> None:
        check = response.checks.add(name="inference_probe")
        if response.state not in (pb.HEALTH_STATE_READY, pb.HEALTH_STATE_DRAINING):
            check.state = response.state
            check.message = "not run: " + _MESSAGES[response.state]
            return
        failure = await self._probe.run(self._lifecycle.serving.engine)
        if failure is None:
            check.state = pb.HEALTH_STATE_READY
            return
        check.state = pb.HEALTH_STATE_NOT_READY
        check.message = failure
        if response.state == pb.HEALTH_STATE_READY:
            response.state = pb.HEALTH_STATE_DEGRADED

    def _abort_one(self, request_id: str) -> pb.AbortResponse:
        entry = self._registry.find(request_id)
        if entry is not None:
            entry.end(EndReason.ABORTED)
            self._registry.close(entry)
            return pb.AbortResponse(status=pb.ABORT_STATUS_ABORTED, message="aborted")
        if self._registry.has_ended(request_id):
            return pb.AbortResponse(
                status=pb.ABORT_STATUS_ALREADY_FINISHED, message="already finished"
            )
        raise errors.request_not_found(request_id)

    def _abort_all(self) -> pb.AbortResponse:
        entries = tuple(self._registry)
        for entry in entries:
            entry.end(EndReason.ABORTED)
            self._registry.close(entry)
        status = pb.ABORT_STATUS_ABORTED if entries else pb.ABORT_STATUS_ALREADY_FINISHED
        return pb.AbortResponse(status=status, message=f"{len(entries)} requests aborted")


def _role_name(role: pb.EngineRole.ValueType) -> str:
    return pb.EngineRole.Name(role).removeprefix("ENGINE_ROLE_")
