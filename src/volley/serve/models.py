"""Models of one server by the names that clients give, each with its own engine and thread."""

from collections.abc import Iterator, Sequence

from volley.errors import ConfigError, did_you_mean
from volley.serve.errors import ApiError
from volley.serve.metrics import HttpMetrics, render
from volley.serve.service import Service


class Models:
    """Services by name. A failure of one engine does not affect the others."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = {service.model: service for service in services}
        if len(self._services) < len(services):
            raise ConfigError("two models have the same name; give each its own")
        self.http = HttpMetrics()

    def __iter__(self) -> Iterator[Service]:
        return iter(self._services.values())

    @property
    def names(self) -> list[str]:
        """Return the names that clients may give as model."""
        return [name for service in self for name in service.names]

    def find(self, name: str | None) -> Service:
        """Return the service for a model's name, which may select an adapter; without a name, the only model's."""
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

    # -- all models ----------------------------------------------------------------------------------------------------
    @property
    def stopped(self) -> list[str]:
        """Return the models whose engine has died."""
        return [service.model for service in self if not service.worker.is_alive]

    @property
    def is_alive(self) -> bool:
        return len(self.stopped) < len(self._services)

    @property
    def held(self) -> int:
        """Return the number of accepted requests that have not ended."""
        return sum(service.preparing + service.worker.held for service in self)

    @property
    def draining(self) -> bool:
        return any(service.draining for service in self)

    def drain(self) -> None:
        """Accept no new requests."""
        for service in self:
            service.draining = True

    def metrics(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return render(self.http, {service.model: service.metrics for service in self})
