"""An environment of three turns without end: its ``Env`` answers every guess."""

import itertools

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    answer: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return trace.last_reply.count(str(self.data.answer)) / max(len(trace.last_reply), 1)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class GuessTaskset(vf.Taskset[GuessTask]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            yield GuessTask(GuessData(prompt=f"guess {number}", system_prompt="short", answer=number % 10), self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for turn in range(2):
                if segment.terminated:
                    break
                segment = await interaction.turn(f"no {turn}")


__all__ = ["GuessEnv", "GuessTaskset"]
