"""One rank in this process: a thread launches plans in order, results are collected by whoever waits for them."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from hardpoint.executor.base import Executor, StepHandle
from hardpoint.scheduler.plan import StepPlan, StepResult
from hardpoint.worker.model_runner import Flight, ModelRunner
from hardpoint.worker.worker import Worker


class _Launched(StepHandle):
    def __init__(self, runner: ModelRunner, flight: Future[Flight]) -> None:
        self._runner = runner
        self._flight = flight

    def result(self) -> StepResult:
        return self._runner.collect(self._flight.result())

    def done(self) -> bool:
        return self._flight.done()


class InProcessExecutor(Executor):
    """Owns a worker. Launching happens on one thread, so that a device without queues of its own still runs beside
    the scheduler."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hardpoint-device")

    def submit(self, plan: StepPlan) -> StepHandle:
        return _Launched(self._worker.runner, self._thread.submit(self._worker.runner.launch, plan))

    def catch_up(self) -> bool:
        return self._thread.submit(self._worker.runner.catch_up).result()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._worker.close()
