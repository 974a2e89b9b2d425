"""A job that gives the function that builds its model. Each worker builds only its own stage; no process holds it all.

penstock profile examples/large_model.py
penstock plan profile.json --cluster local:4 --schedule 1f1b
penstock train examples/large_model.py plan.json
"""

import torch
from torch import Tensor, nn

from penstock import Job

WORDS, WIDTH, BLOCKS, LENGTH = 1000, 256, 8, 32  # may be larger: only one stage has to fit a worker


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask)
        return self.head(hidden)


def job() -> Job:
    torch.manual_seed(0)
    text = torch.randint(0, WORDS, (64, LENGTH + 1))  # replace by your own data
    return Job(
        model=Decoder,  # the class itself: it is called without arguments
        data=torch.utils.data.TensorDataset(text[:, :-1], text[:, 1:]),
        loss=lambda output, target: nn.functional.cross_entropy(output.flatten(0, 1), target.flatten()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=8,
    )
