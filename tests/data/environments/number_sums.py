"""A taskset as authors of verifiers environments write it: sums of two digits, one turn each."""

import verifiers.v1 as vf


class SumConfig(vf.TasksetConfig):
    largest: int = 5


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, task: SumData, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 8)

    @vf.metric
    async def asked(self, trace: vf.Trace) -> float:
        return float(sum(message.role == "user" for message in trace.messages))


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for a in range(self.config.largest + 1):
            for b in range(self.config.largest + 1):
                yield SumTask(SumData(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task)


__all__ = ["SumTaskset"]
