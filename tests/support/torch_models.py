"""Small PyTorch models of every kind, with example inputs."""

import torch
from torch import nn
from torch.nn import functional as F


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 5))

    def forward(self, x):
        return self.layers(x)


class Bottleneck(nn.Module):
    def __init__(self, channels, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Sequential(
            nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
        )

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu(out + self.down(x))


class ResNet(nn.Module):
    """ResNet-50's parts, few and narrow."""

    def __init__(self, width=8):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = Bottleneck(width, width, 1)
        self.layer2 = Bottleneck(4 * width, width, 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(4 * width, 10)

    def forward(self, x):
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(x, 1))


class GPTBlock(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc, self.proj = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(d, dim=2)
        q, k, v = (a.view(b, t, self.heads, d // self.heads).transpose(1, 2) for a in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(b, t, d))
        return x + self.proj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2, weights of embedding and head tied."""

    def __init__(self, vocab=64, d=32, heads=4, layers=2, positions=16):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(positions, d)
        self.h = nn.ModuleList(GPTBlock(d, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(d)
        self.lm_head = nn.Linear(d, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(places)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class RMSNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        own = x.float()
        return (own * torch.rsqrt(own.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(
            x
        ) * self.weight


def rotated(x, cos, sin):
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class LlamaLayer(nn.Module):
    def __init__(self, d, heads, groups):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, d // heads
        self.attention_norm, self.ffn_norm = RMSNorm(d), RMSNorm(d)
        self.wq = nn.Linear(d, d, bias=False)
        self.wk = nn.Linear(d, groups * self.size, bias=False)
        self.wv = nn.Linear(d, groups * self.size, bias=False)
        self.wo = nn.Linear(d, d, bias=False)
        self.w1, self.w3 = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, 3 * d, bias=False)
        self.w2 = nn.Linear(3 * d, d, bias=False)

    def forward(self, x, cos, sin):
        b, t, d = x.shape
        y = self.attention_norm(x)
        q = self.wq(y).view(b, t, self.heads, self.size).transpose(1, 2)
        k = self.wk(y).view(b, t, self.groups, self.size).transpose(1, 2)
        v = self.wv(y).view(b, t, self.groups, self.size).transpose(1, 2)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(y.transpose(1, 2).reshape(b, t, d))
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    def __init__(self, vocab=64, d=32, heads=4, groups=2, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(LlamaLayer(d, heads, groups) for _ in range(layers))
        self.norm, self.output = RMSNorm(d), nn.Linear(d, vocab, bias=False)
        size = d // heads
        self.register_buffer("inv_freq", 1e4 ** -(torch.arange(0, size, 2).float() / size))

    def forward(self, tokens):
        x = self.embed(tokens)
        angles = torch.outer(torch.arange(tokens.shape[1]).float(), self.inv_freq)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x))


class Encoder(nn.Module):
    """BERT's layers, with a padding mask."""

    def __init__(self, vocab=64, d=32, heads=4, layers=2, positions=16):
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, d), nn.Embedding(positions, d)
        self.norm = nn.LayerNorm(d)
        layer = nn.TransformerEncoderLayer(d, heads, 4 * d, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(d, vocab)

    def forward(self, tokens, padded):
        x = self.norm(self.words(tokens) + self.places.weight[: tokens.shape[1]])
        return self.head(self.encoder(x, src_key_padding_mask=padded))


def tokens(batch=2, length=16, vocab=64):
    return torch.randint(vocab, (batch, length))


def examples():
    """Each kind of model with its inputs."""
    torch.manual_seed(0)
    padded = torch.zeros(2, 16, dtype=torch.bool)
    padded[1, 12:] = True
    return {
        "mlp": (MLP(), (torch.randn(3, 12),)),
        "resnet": (ResNet(), (torch.randn(2, 3, 32, 32),)),
        "gpt": (GPT(), (tokens(),)),
        "llama": (Llama(), (tokens(),)),
        "encoder": (Encoder(), (tokens(), padded)),
    }


class Called(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)
