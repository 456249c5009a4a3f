"""A taskset whose tasks have a tool, which a server of the package runs."""

import verifiers.v1 as vf


class AdderConfig(vf.ToolsetConfig):
    pass


class Adder(vf.Toolset[AdderConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)


class AdderTask(vf.Task):
    @vf.reward
    async def used(self, trace: vf.Trace) -> float:
        return float([message.content for message in trace.tool_messages] == ["3"] and trace.last_reply == "it is 3")

    @classmethod
    def toolsets(cls, config):
        return [Adder(AdderConfig())]


class AdderTaskset(vf.Taskset[AdderTask]):
    def load(self):
        for number in range(4):
            yield AdderTask(vf.TaskData(prompt=f"add {number} and 2"), self.config.task)


__all__ = ["AdderTaskset"]

if __name__ == "__main__":
    Adder.run()
