"""Lightning: ``Trainer(callbacks=[AmpscopeCallback()])``.

The scaler is the precision plugin's, the optimizers are the trainer's; losses are seen where the
trainer calls backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ampscope.integrations import TrainerWatch

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

try:
    from lightning.pytorch.callbacks import Callback
except ModuleNotFoundError:
    try:  # the same code under its older name
        from pytorch_lightning.callbacks import Callback  # type: ignore[assignment]  # as said
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            'Lightning is not installed: pip install "ampscope[lightning]"'
        ) from None


class AmpscopeCallback(TrainerWatch, Callback):
    """Watches a fit. Options, and more of them, are those of `ampscope.watch`; the policy ``stop``
    ends the fit after the step that raised an alarm (``trainer.should_stop``)."""

    _loss: Tensor | None = None  # of the batches that were accumulated so far
    _step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After the optimizers were made, and the checks that Lightning runs before training."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._start(trainer.model, trainer.optimizers, scaler)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """A step over several batches has the sum of their losses, each of which Lightning has
        divided by their number and multiplied by the loss scale; the watch alone would see the
        last."""
        if self.run is None or trainer.accumulate_grad_batches == 1:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        loss = loss.detach() / (scaler.get_scale() if scaler is not None else 1.0)
        is_first = self._step != trainer.global_step
        self._loss = loss if is_first or self._loss is None else self._loss + loss
        self._step = trainer.global_step
        self.run.loss(self._loss)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """The trainer looks at ``should_stop`` next."""
        trainer.should_stop |= self._should_stop

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The fit is over."""
        self._close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """The fit raised, or was interrupted."""
        self._close(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """However it ended."""
        self._close()
