"""Lightning: ``Trainer(callbacks=[AmpscopeCallback()])``.

The scaler is the precision plugin's, the optimizers are the trainer's; losses are seen where the
trainer calls backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
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
    _problem: str | None = None  # of the state that was saved last, until its file is there
    _saved: Mapping[str, tuple[int, int]] = {}  # checkpoints seen so far: inode, time of the write

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After the optimizers were made, and the checks that Lightning runs before training."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._start(trainer.model, trainer.optimizers, scaler)
        self._saved, self._problem = _saved(trainer), None

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

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """With ``guard=True``: what is being saved is looked at; its file is not there yet."""
        if self.run is not None and self._options.get("guard"):
            self._problem = self.run.state_problem()

    def _mark(self, trainer: Trainer) -> None:
        """Checkpoints written since the last call are kept from rotation where healthy."""
        if self.run is None or self._problem is None or not trainer.is_global_zero:
            return
        problem, self._problem = self._problem, None
        before, self._saved = self._saved, _saved(trainer)
        for path, written in self._saved.items():
            if before.get(path) != written:
                self.run.checkpoint(path, keep=True, problem=problem)

    def on_train_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Checkpoints of the batch before are written."""
        self._mark(trainer)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """The trainer looks at ``should_stop`` next."""
        trainer.should_stop |= self._should_stop

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The fit is over."""
        self._mark(trainer)
        self._close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """The fit raised, or was interrupted."""
        self._close(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """However it ended."""
        self._close()


def _saved(trainer: Trainer) -> dict[str, tuple[int, int]]:
    """The files or folders that the trainer's checkpoint callbacks keep at present. Not what is
    written again and again under one name (``last.ckpt``): a hard link would change with it."""
    found = {}
    for callback in trainer.checkpoint_callbacks:
        of_scores = getattr(callback, "best_k_models", {})
        for path in {*of_scores, getattr(callback, "best_model_path", "")}:
            if path and Path(path).exists():
                stat = Path(path).stat()
                found[path] = stat.st_ino, stat.st_mtime_ns
    return found
