"""The models of one server: found by the names that clients give, each with an engine and a thread of its own."""

from collections.abc import Iterator, Sequence

from volley.errors import ConfigError, did_you_mean
from volley.serve.errors import ApiError
from volley.serve.metrics import HttpMetrics, render
from volley.serve.service import Service


class Models:
    """Services by name. What happens to one engine leaves the others alone."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = {service.model: service for service in services}
        if len(self._services) < len(services):
            raise ConfigError("two models have the same name; give each its own")
        self.http = HttpMetrics()

    def __iter__(self) -> Iterator[Service]:
        return iter(self._services.values())

    @property
    def names(self) -> list[str]:
        """What clients may give as model."""
        return [name for service in self for name in service.names]

    def find(self, name: str | None) -> Service:
        """The service of a model's name, which may choose an adapter; without a name, of the only model."""
        if name is None:
            if len(self._services) == 1:
                return next(iter(self))
            known = ", ".join(map(repr, self.names))
            raise ApiError(400, f"model: say which; this server has {known}", param="model")
        for service in self:
            if name in service.names:
                return service
        known = ", ".join(map(repr, self.names))
        hint = did_you_mean(name, self.names)
        message = f"the model {name!r} does not exist; this server has {known}" + (f"; {hint}" if hint else "")
        raise ApiError(404, message, param="model", code="model_not_found")

    # -- all of them ---------------------------------------------------------------------------------------------------
    @property
    def stopped(self) -> list[str]:
        """Models whose engine has died."""
        return [service.model for service in self if not service.worker.is_alive]

    @property
    def is_alive(self) -> bool:
        return len(self.stopped) < len(self._services)

    @property
    def held(self) -> int:
        """Requests that were taken and are not yet over."""
        return sum(service.preparing + service.worker.held for service in self)

    @property
    def draining(self) -> bool:
        return any(service.draining for service in self)

    def drain(self) -> None:
        """Take nothing new."""
        for service in self:
            service.draining = True

    def metrics(self) -> bytes:
        """Prometheus' text format."""
        return render(self.http, {service.model: service.metrics for service in self})
