"""Networks as users write them: modules that use layers, weights and constants in ways no runner foresees.

`ZOO` maps a name to the class; each takes rows of 3 numbers (or images of 1 × 5 × 6, see `IMAGES`) to 2 outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TiedModule(nn.Module):
    """One linear layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.a, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.into(x))
        return self.out(torch.tanh(self.a(torch.tanh(self.a(h)))))


class TiedWeight(nn.Module):
    """Two layers that share one weight (and keep a bias each)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x)))))


class BorrowedWeight(nn.Module):
    """A layer's weight read again by hand, transposed: an autoencoder's decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(3, 4), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(F.linear(torch.tanh(self.a(x)), self.a.weight.T)))


class WeightNormed(nn.Module):
    """weight_norm as a parametrisation."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.a(x)))


class OldWeightNormed(nn.Module):
    """weight_norm by the older hook."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.weight_norm(nn.Linear(3, 4))
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.a(x)))


class SpectralNormed(nn.Module):
    """spectral_norm, whose buffers move in training."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.a(x)))


class ClosedGate(nn.Module):
    """A weight read again behind a gate that only far points open."""

    def __init__(self, threshold: float = 1.5) -> None:
        super().__init__()
        self.a, self.out, self.threshold = nn.Linear(3, 3), nn.Linear(3, 2), threshold

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        gate = torch.relu(x[:, :1].abs() - self.threshold)
        return self.out(h + gate * (x @ self.a.weight))


class ScaledWhenOpen(nn.Module):
    """A layer of a class of its own, scaled, behind the same gate."""

    class Standardised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight / self.weight.norm(dim=1, keepdim=True), self.bias)

    def __init__(self, threshold: float = 1.5) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 3), self.Standardised(3, 3), nn.Linear(3, 2)
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.relu(x[:, :1].abs() - self.threshold)
        return self.out(torch.tanh(self.a(x)) + gate * self.b(x))


class Branches(nn.Module):
    """Layers by the value of the inputs, one branch a point."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = [torch.tanh(self.a(r) if r[0] > 0 else self.b(r)) for r in x]
        return self.out(torch.stack(rows))


class Scalars(nn.Module):
    """Parameters that are single numbers, used outside every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(3, 4), nn.Linear(4, 2)
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.a(x)) * self.scale) + self.shift


class NeverCalled(nn.Module):
    """A layer that forward never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.spare, self.out = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.a(x)))


class Recurrent(nn.Module):
    """LSTM or GRU over the columns."""

    kind: type[nn.RNNBase] = nn.LSTM

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = self.kind(1, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(x.unsqueeze(-1))[0][:, -1])


class Gated(Recurrent):
    """The GRU."""

    kind = nn.GRU


class Constants(nn.Module):
    """Constants that are plain tensors, no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 2)
        self.basis = torch.linspace(-1, 1, 12).reshape(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(F.linear(x, self.basis)))


class LocalConstants(nn.Module):
    """Constants made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(F.linear(x, torch.linspace(-1, 1, 12).reshape(4, 3))))


class OwnDropout(nn.Module):
    """Dropout as a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.out = nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(torch.tanh(self.a(x))))


class AlwaysDropout(nn.Module):
    """Dropout by function, which evaluation does not turn off."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.dropout(torch.tanh(self.a(x))))


class BilinearNet(nn.Module):
    """nn.Bilinear of a point with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.out = nn.Bilinear(3, 3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.pair(x, x)))


class Attending(nn.Module):
    """nn.MultiheadAttention over the columns."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.attention = nn.Linear(1, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x.unsqueeze(-1))
        return self.out(self.attention(h, h, h, need_weights=False)[0].mean(1))


class Grouped(nn.Module):
    """Convolutions in groups, dilated, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv2d(1, 4, 3, padding=2, dilation=2)
        self.grouped, self.up = nn.Conv2d(4, 4, 3, groups=2), nn.ConvTranspose2d(4, 2, 2)
        self.out = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.into, self.grouped, self.up):
            x = torch.tanh(layer(x))
        return self.out(x.mean((2, 3)))


class Activated(nn.Module):
    """PReLU, whose slope is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.slope, self.out = nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.slope(self.a(x)))


class Embedded(nn.Module):
    """An embedding of the first column, which counts how often it is above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.a, self.out = nn.Embedding(2, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.a(x) + self.table((x[:, 0] > 0).long())))


class SharedNorm(nn.Module):
    """One batch normalisation used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(3, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.norm(self.b(torch.tanh(self.norm(self.a(x)))))))


class PlainList(nn.Module):
    """Layers in a plain list, of which PyTorch knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = [nn.Linear(3, 4), nn.Linear(4, 4)], nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x)


class InPlace(nn.Module):
    """Operations that write into their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.out = nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h += 0.1
        h[:, 0] = h[:, 0] * 2
        return self.out(self.act(h))


class SpoiledInputs(nn.Module):
    """Writes into the inputs, which are the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.5
        return self.out(torch.tanh(self.a(x)))


class NoBackward(nn.Module):
    """Writes into what the backward pass needs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        h += 0.1
        return self.out(h)


class ByKeyword(nn.Module):
    """A layer called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.a(input=x)))


class Doubled(nn.Module):
    """A layer whose own class changes its output, and one with a hook that does."""

    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = self.Twice(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.b.register_forward_hook(lambda module, inputs, output: 2 * output)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x)))))


ZOO: dict[str, type[nn.Module]] = {
    "tied module": TiedModule,
    "tied weight": TiedWeight,
    "borrowed weight": BorrowedWeight,
    "weight norm": WeightNormed,
    "old weight norm": OldWeightNormed,
    "spectral norm": SpectralNormed,
    "closed gate": ClosedGate,
    "scaled when open": ScaledWhenOpen,
    "branches": Branches,
    "scalars": Scalars,
    "never called": NeverCalled,
    "lstm": Recurrent,
    "gru": Gated,
    "constants": Constants,
    "local constants": LocalConstants,
    "own dropout": OwnDropout,
    "always dropout": AlwaysDropout,
    "bilinear": BilinearNet,
    "attention": Attending,
    "grouped": Grouped,
    "prelu": Activated,
    "embedding": Embedded,
    "shared norm": SharedNorm,
    "plain list": PlainList,
    "in place": InPlace,
    "spoiled inputs": SpoiledInputs,
    "no backward": NoBackward,
    "by keyword": ByKeyword,
    "doubled": Doubled,
}
IMAGES = {"grouped"}
