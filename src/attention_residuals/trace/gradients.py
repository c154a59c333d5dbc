"""The tap that keeps the gradients that reach each writer."""

from torch import Tensor

from attention_residuals.errors import TapError
from attention_residuals.layers.tap import Onlooker, Pass, Write

__all__ = ["GradientRecorder"]


class GradientRecorder(Onlooker):
    """A tap that keeps the gradient of the loss with respect to every writer's output.

    Use it for one forward and one backward pass, then read ``magnitudes``.
    """

    def __init__(self) -> None:
        self._outputs: dict[str, Tensor] = {}

    def begin(self, run: Pass) -> None:
        """Starts anew."""
        self._outputs.clear()

    def write(self, write: Write) -> Write:
        """Asks autograd to keep this output's gradient."""
        write.output.retain_grad()
        self._outputs[write.writer] = write.output
        return write

    def magnitudes(self) -> dict[str, float]:
        """Returns, by writer, the root mean square over tokens and channels of the loss's gradient.

        Raises:
            TapError: There was no backward pass.
        """
        result = {}
        for writer, output in self._outputs.items():
            if output.grad is None:
                raise TapError(
                    got=f"no gradient at {writer}",
                    expected="a backward pass",
                    do="call loss.backward() first",
                )
            result[writer] = output.grad.float().square().mean().sqrt().item()
        return result
