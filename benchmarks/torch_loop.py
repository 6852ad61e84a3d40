"""PyTorch's usual accumulation loop, in a process that step_time.py starts.

    python -m benchmarks.torch_loop MODEL MICRO_BATCH UPDATES STEPS THREADS

Each line that it reads makes it train through the data once more, and write
how long that took. It needs PyTorch and nothing of this project.
"""

import json
import sys

import benchmarks


def layers(nn, torch):
    """The models of models.py, by name."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(128, 4, batch_first=True)
            self.norms = nn.ModuleList([nn.LayerNorm(128) for _ in range(2)])
            self.dense = nn.Sequential(
                nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128)
            )

        def forward(self, x):
            attended, _ = self.attention(x, x, x, need_weights=False)
            x = self.norms[0](x + attended)
            return self.norms[1](x + self.dense(x))

    class Residual(nn.Module):
        def __init__(self, before, after):
            super().__init__()
            self.long = nn.Sequential(
                nn.Conv2d(before, after, 3, 2, padding=1),
                nn.GroupNorm(8, after),
                nn.ReLU(),
                nn.Conv2d(after, after, 3, padding=1),
            )
            self.short = nn.Conv2d(before, after, 1, 2)

        def forward(self, x):
            return torch.relu(self.short(x) + self.long(x))

    class Mean(nn.Module):
        def __init__(self, *axes):
            super().__init__()
            self.axes = axes

        def forward(self, x):
            return x.mean(self.axes)

    return {
        "transformer": lambda: nn.Sequential(
            nn.Embedding(1000, 128),
            *(Block() for _ in range(3)),
            Mean(1),
            nn.Linear(128, 10),
        ),
        "cnn": lambda: nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            *(Residual(a, b) for a, b in ((32, 32), (32, 64), (64, 128))),
            Mean(2, 3),
            nn.Linear(128, 10),
        ),
        "mlp": lambda: nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10)
        ),
    }


def inputs(torch, name, rows):
    """One micro-batch of so many examples."""
    if name == "transformer":
        return torch.randint(0, 1000, (rows, 32))
    return torch.randn((rows, 3, 32, 32) if name == "cnn" else (rows, 8))


def main():
    """Trains whenever it is told to."""
    name, *numbers = sys.argv[1:]
    micro_batch, updates, steps, threads = map(int, numbers)
    try:
        import torch
    except ImportError as error:
        print(json.dumps({"skipped": str(error)}), flush=True)
        return
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = layers(torch.nn, torch)[name]()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    loss = torch.nn.CrossEntropyLoss()
    data = []
    for _ in range(updates * steps):
        x = inputs(torch, name, micro_batch)
        data.append((x, torch.randint(0, 10, x.shape[:1])))

    def fit():
        for step, (x, y) in enumerate(data, start=1):
            (loss(model(x), y) / steps).backward()
            if step % steps == 0:
                optimizer.step()
                optimizer.zero_grad()

    fit()
    parameters = sum(p.numel() for p in model.parameters())
    found = {"torch": torch.__version__, "parameters": parameters}
    print(json.dumps(found), flush=True)
    for _ in sys.stdin:
        print(json.dumps(benchmarks.timed(fit)), flush=True)


if __name__ == "__main__":
    main()
