"""The engines that `hardpoint bench compare` knows: each opens a model and runs a workload of token ids.

They live in child processes (`main` here), one each, because every one of them thinks that the device is its own.
What a child is told comes as lines of JSON over stdin, its answers leave as lines of JSON over what was its stdout.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import msgspec

from hardpoint.bench.workloads import Workload, workload
from hardpoint.config.engine import EngineConfig


@dataclass(frozen=True)
class Setup:
    """What all of them are opened with.

    Attributes:
        config: of hardpoint. The others get the model, its dtype and context, whether weights are made up, and the
            requests at once; all have their prefix cache off, and steps of the others are as large as they like.
        memory: share of the device's memory for each engine.
    """

    config: EngineConfig
    memory: float

    @property
    def dummy(self) -> bool:
        """Whether weights are made up."""
        return self.config.model.load_format == "dummy"


class Contestant(ABC):
    """An engine in this process."""

    @abstractmethod
    def __init__(self, setup: Setup) -> None:
        """Ready to run."""

    @property
    @abstractmethod
    def version(self) -> str:
        """Name and version of the software, and where it runs."""

    @abstractmethod
    def run(self, work: Workload) -> int:
        """Run to the end. Returns the output tokens made."""


class Hardpoint(Contestant):
    """This one, prefix cache off as for the others."""

    def __init__(self, setup: Setup) -> None:
        from hardpoint.engine.build import build_engine
        from hardpoint.engine.process import SWITCH_INTERVAL

        sys.setswitchinterval(SWITCH_INTERVAL)  # as in the engine process
        self._built = build_engine(setup.config)
        self._runs = 0

    @property
    def version(self) -> str:
        from hardpoint import __version__

        return f"hardpoint {__version__} on {self._built.info.device_name}"

    def run(self, work: Workload) -> int:
        from hardpoint.errors import EngineError
        from hardpoint.protocol.messages import EngineRequest
        from hardpoint.request.sampling import SamplingParams

        engine, made = self._built.engine, 0
        while engine.catch_up():  # as a server does before its first request; the first round does not count
            pass
        self._runs += 1
        for number, (prompt, out) in enumerate(zip(work.prompts, work.outputs, strict=True)):
            params = SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True)
            engine.add(EngineRequest(request_id=f"{self._runs}-{number}", prompt=prompt, params=params))
        while engine.has_work:
            for output in engine.step().outputs:
                made += len(output.token_ids)
                if output.error:
                    raise EngineError(output.error)
        return made


class Vllm(Contestant):
    """vLLM's offline interface with its defaults, prefix cache off."""

    def __init__(self, setup: Setup) -> None:
        self._vllm = import_module("vllm")
        self._llm = self._vllm.LLM(
            model=setup.config.model.model,
            dtype=setup.config.model.dtype,
            load_format="dummy" if setup.dummy else "auto",
            skip_tokenizer_init=True,
            max_model_len=setup.config.model.max_model_len,
            max_num_seqs=setup.config.scheduler.max_num_seqs,
            gpu_memory_utilization=setup.memory,
            enable_prefix_caching=False,
        )

    @property
    def version(self) -> str:
        return f"vllm {self._vllm.__version__}"

    def run(self, work: Workload) -> int:
        prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts]
        params = [
            self._vllm.SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True, detokenize=False)
            for out in work.outputs
        ]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)


class Sglang(Contestant):
    """SGLang's offline engine with its defaults, prefix cache off."""

    def __init__(self, setup: Setup) -> None:
        self._sglang = import_module("sglang")
        self._engine = self._sglang.Engine(
            model_path=setup.config.model.model,
            dtype=setup.config.model.dtype,
            load_format="dummy" if setup.dummy else "auto",
            skip_tokenizer_init=True,
            context_length=setup.config.model.max_model_len,
            max_running_requests=setup.config.scheduler.max_num_seqs,
            mem_fraction_static=setup.memory,
            disable_radix_cache=True,
        )

    @property
    def version(self) -> str:
        return f"sglang {self._sglang.__version__}"

    def run(self, work: Workload) -> int:
        params = [{"temperature": 0.0, "max_new_tokens": out, "ignore_eos": True} for out in work.outputs]
        outputs = self._engine.generate(input_ids=list(work.prompts), sampling_params=params)
        return sum(output["meta_info"]["completion_tokens"] for output in outputs)


#: By the name of the package to import.
OTHERS: Mapping[str, type[Contestant]] = {"vllm": Vllm, "sglang": Sglang}
CONTESTANTS: Mapping[str, type[Contestant]] = {"hardpoint": Hardpoint, **OTHERS}


def importable() -> list[str]:
    """Names of the others that are installed here; nothing is imported."""
    return [name for name in OTHERS if find_spec(name) is not None]


def main(name: str) -> int:
    """A child: opens the engine, then runs a workload per line. 1 after an error, which is told as the last answer."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not mix with the answers

    def answer(made: Callable[[], dict[str, Any]]) -> bool:
        started = time.perf_counter()
        try:
            told = made()
        except Exception as error:
            traceback.print_exc()
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers)
            return False
        print(json.dumps(told | {"seconds": time.perf_counter() - started}), file=answers)
        return True

    held: list[Contestant] = []

    def open_it(setup: Setup) -> dict[str, Any]:
        held.append(CONTESTANTS[name](setup))
        return {"version": held[0].version}

    if not answer(lambda: open_it(msgspec.json.decode(sys.stdin.readline(), type=Setup))):
        return 1
    for line in sys.stdin:
        work = workload(**json.loads(line))
        if not answer(lambda work=work: {"output_tokens": held[0].run(work)}):  # type: ignore[misc]
            return 1
    return 0


def first_line(setup: Setup) -> str:
    """What a child is told first."""
    return msgspec.json.encode(setup).decode()


if __name__ == "__main__":
    # Engines end their own processes in ways of their own, some of which wait for ever.
    code = main(sys.argv[1])
    sys.stderr.flush()
    os._exit(code)
