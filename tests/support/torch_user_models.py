"""Models of PyTorch as users write them: diffusion, scans, experts, recommendation, speech."""

import math

import torch
from torch import nn
from torch.nn import functional as F


class Res(nn.Module):
    def __init__(self, i, o, t):
        super().__init__()
        self.n1 = nn.GroupNorm(8, i)
        self.c1 = nn.Conv2d(i, o, 3, padding=1)
        self.t = nn.Linear(t, o)
        self.n2 = nn.GroupNorm(8, o)
        self.d = nn.Dropout(0.1)
        self.c2 = nn.Conv2d(o, o, 3, padding=1)
        self.s = nn.Conv2d(i, o, 1) if i != o else nn.Identity()

    def forward(self, x, t):
        h = self.c1(F.silu(self.n1(x)))
        h = h + self.t(F.silu(t))[:, :, None, None]
        h = self.c2(self.d(F.silu(self.n2(h))))
        return self.s(x) + h


class AttnBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n = nn.GroupNorm(8, c)
        self.qkv = nn.Conv2d(c, 3 * c, 1)
        self.o = nn.Conv2d(c, c, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.n(x)).reshape(b, 3, 4, c // 4, h * w).transpose(-1, -2).unbind(1)
        return x + self.o(
            F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(b, c, h, w)
        )


class UNet(nn.Module):
    def __init__(self, ch=32, mult=(1, 2, 4)):
        super().__init__()
        self.ch = ch
        t = ch * 4
        self.time = nn.Sequential(nn.Linear(ch, t), nn.SiLU(), nn.Linear(t, t))
        self.inp = nn.Conv2d(3, ch, 3, padding=1)
        self.down = nn.ModuleList()
        self.up = nn.ModuleList()
        cs = [ch]
        c = ch
        for m in mult:
            self.down.append(nn.ModuleList([Res(c, ch * m, t), nn.Conv2d(ch * m, ch * m, 3, 2, 1)]))
            c = ch * m
            cs.append(c)
        self.mid = nn.ModuleList([Res(c, c, t), AttnBlock(c), Res(c, c, t)])
        for m in reversed(mult):
            self.up.append(
                nn.ModuleList(
                    [Res(c + cs.pop(), ch * m, t), nn.Conv2d(ch * m, ch * m, 3, padding=1)]
                )
            )
            c = ch * m
        self.out = nn.Sequential(nn.GroupNorm(8, c), nn.SiLU(), nn.Conv2d(c, 3, 3, padding=1))

    def forward(self, x, ts):
        half = self.ch // 2
        fr = torch.exp(-math.log(10000) * torch.arange(half, device=x.device) / half)
        a = ts[:, None].float() * fr[None]
        t = self.time(torch.cat([a.sin(), a.cos()], -1))
        x = self.inp(x)
        hs = []
        for r, d in self.down:
            x = r(x, t)
            hs.append(x)
            x = d(x)
        x = self.mid[2](self.mid[1](self.mid[0](x, t)), t)
        for r, u in self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = r(torch.cat([x, hs.pop()], 1), t)
            x = u(x)
        return self.out(x)


class Mamba(nn.Module):
    def __init__(self, d=32, n=8, k=4, exp=2):
        super().__init__()
        self.d = d * exp
        self.n = n
        self.r = max(1, d // 16)
        self.inp = nn.Linear(d, 2 * self.d, bias=False)
        self.conv = nn.Conv1d(self.d, self.d, k, groups=self.d, padding=k - 1)
        self.xp = nn.Linear(self.d, self.r + 2 * n, bias=False)
        self.dt = nn.Linear(self.r, self.d)
        self.A = nn.Parameter(torch.log(torch.arange(1, n + 1).float().repeat(self.d, 1)))
        self.D = nn.Parameter(torch.ones(self.d))
        self.out = nn.Linear(self.d, d, bias=False)

    def forward(self, x):
        b, steps, _ = x.shape
        x, z = self.inp(x).chunk(2, -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., :steps].transpose(1, 2))
        A = -torch.exp(self.A.float())
        dt, B, C = self.xp(x).split([self.r, self.n, self.n], -1)
        dt = F.softplus(self.dt(dt))
        dA = torch.exp(torch.einsum("bld,dn->bldn", dt, A))
        dB = torch.einsum("bld,bln,bld->bldn", dt, B, x)
        h = torch.zeros(b, self.d, self.n, device=x.device)
        ys = []
        for i in range(steps):
            h = dA[:, i] * h + dB[:, i]
            ys.append(torch.einsum("bdn,bn->bd", h, C[:, i]))
        y = torch.stack(ys, 1) + x * self.D
        return self.out(y * F.silu(z))


class MoE(nn.Module):
    def __init__(self, d=32, e=4, k=2, f=64):
        super().__init__()
        self.e, self.k = e, k
        self.gate = nn.Linear(d, e, bias=False)
        self.w1 = nn.Parameter(torch.randn(e, d, f) * 0.02)
        self.w2 = nn.Parameter(torch.randn(e, f, d) * 0.02)
        self.cap = 2

    def forward(self, x):
        b, t, d = x.shape
        x = x.reshape(-1, d)
        n = x.shape[0]
        p = self.gate(x).softmax(-1, dtype=torch.float32)
        w, i = torch.topk(p, self.k, -1)
        w = w / w.sum(-1, keepdim=True)
        flat = i.flatten()
        order = torch.argsort(flat, stable=True)
        tok = order // self.k
        c = n * self.k // self.e
        xs = x[tok].reshape(self.e, c, d)
        h = torch.bmm(F.gelu(torch.bmm(xs, self.w1)), self.w2).reshape(-1, d)
        out = torch.zeros_like(x)
        out.index_add_(0, tok, h * w.flatten()[order][:, None].to(h.dtype))
        load = F.one_hot(flat, self.e).sum(0)
        return out.reshape(b, t, d), load


class MoEMask(nn.Module):
    def __init__(self, d=32, e=4, k=2, f=64):
        super().__init__()
        self.gate = nn.Linear(d, e, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, f), nn.SiLU(), nn.Linear(f, d)) for _ in range(e)
        )
        self.k = k

    def forward(self, x):
        sh = x.shape
        x = x.view(-1, sh[-1])
        w, i = torch.topk(self.gate(x), self.k)
        w = F.softmax(w, 1)
        out = torch.zeros_like(x)
        for e, m in enumerate(self.experts):
            bi, ne = torch.where(i == e)
            out[bi] += w[bi, ne, None] * m(x[bi])
        return out.view(sh)


class DLRM(nn.Module):
    def __init__(self, tables=4, rows=1000, d=16):
        super().__init__()
        self.emb = nn.ModuleList(nn.EmbeddingBag(rows, d, mode="sum") for _ in range(tables))
        self.bot = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, d), nn.ReLU())
        n = tables + 1
        self.top = nn.Sequential(nn.Linear(d + n * (n - 1) // 2, 64), nn.ReLU(), nn.Linear(64, 1))
        i, j = torch.tril_indices(n, n, -1)
        self.register_buffer("i", i)
        self.register_buffer("j", j)

    def forward(self, dense, idx, off):
        x = self.bot(dense)
        es = [e(idx[k], off[k]) for k, e in enumerate(self.emb)]
        t = torch.stack([x, *es], 1)
        z = torch.bmm(t, t.transpose(1, 2))[:, self.i, self.j]
        return torch.sigmoid(self.top(torch.cat([x, z], 1)))


class ViT(nn.Module):
    def __init__(self, d=48, p=8, img=32):
        super().__init__()
        self.patch = nn.Conv2d(3, d, p, p)
        n = (img // p) ** 2
        self.cls = nn.Parameter(torch.zeros(1, 1, d))
        self.pos = nn.Parameter(torch.zeros(1, n + 1, d))
        self.enc = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(
                d, 4, 96, batch_first=True, norm_first=True, activation="gelu"
            ),
            2,
            enable_nested_tensor=False,
        )
        self.head = nn.Linear(d, 10)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
        return self.head(self.enc(x)[:, 0])


class XAttn(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q = nn.Linear(d, d)
        self.k = nn.Linear(d, d, bias=False)
        self.v = nn.Linear(d, d)
        self.o = nn.Linear(d, d)

    def forward(self, x, xa=None, mask=None, cache=None, pos=None):
        q = self.q(x)
        k = self.k(xa if xa is not None else x)
        v = self.v(xa if xa is not None else x)

        q, k, v = (a.view(*a.shape[:2], self.h, -1).transpose(1, 2) for a in (q, k, v))
        if cache is not None:
            cache[0].index_copy_(2, pos, k)
            cache[1].index_copy_(2, pos, v)
            k, v = cache
        return self.o(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        )


class WBlock(nn.Module):
    def __init__(self, d, h, x):
        super().__init__()
        self.a = XAttn(d, h)
        self.n = nn.LayerNorm(d)
        self.x = XAttn(d, h) if x else None
        self.nx = nn.LayerNorm(d) if x else None
        self.m = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.nm = nn.LayerNorm(d)
        if x:
            self.register_buffer("ck", torch.zeros(1, h, 16, d // h))
            self.register_buffer("cv", torch.zeros(1, h, 16, d // h))

    def forward(self, x, xa=None, mask=None, pos=None):
        x = x + self.a(
            self.n(x), mask=mask, cache=(self.ck, self.cv) if self.x is not None else None, pos=pos
        )
        if self.x is not None:
            x = x + self.x(self.nx(x), xa)
        return x + self.m(self.nm(x))


class Whisper(nn.Module):
    def __init__(self, d=32, h=4, mel=20, t=32):
        super().__init__()
        self.c1 = nn.Conv1d(mel, d, 3, padding=1)
        self.c2 = nn.Conv1d(d, d, 3, stride=2, padding=1)
        self.register_buffer("pe", torch.randn(t // 2, d))
        self.enc = nn.ModuleList(WBlock(d, h, False) for _ in range(2))
        self.ln = nn.LayerNorm(d)
        self.tok = nn.Embedding(100, d)
        self.pos = nn.Parameter(torch.zeros(16, d))
        self.dec = nn.ModuleList(WBlock(d, h, True) for _ in range(2))
        self.lnd = nn.LayerNorm(d)

    def forward(self, mel, tok, pos):
        x = F.gelu(self.c1(mel))
        x = F.gelu(self.c2(x)).permute(0, 2, 1)
        x = (x + self.pe).to(x.dtype)
        for b in self.enc:
            x = b(x)
        xa = self.ln(x)
        y = self.tok(tok) + self.pos[pos]
        mask = (torch.arange(16)[None, :] <= pos[:, None])[None, None]
        for b in self.dec:
            y = b(y, xa, mask, pos)
        return (self.lnd(y) @ self.tok.weight.T).float()


def examples():
    """Each model with inputs."""
    torch.manual_seed(0)
    return {
        "unet": (UNet(), (torch.randn(2, 3, 16, 16), torch.randint(0, 1000, (2,)))),
        "mamba": (Mamba(), (torch.randn(2, 6, 32),)),
        "moe": (MoE(), (torch.randn(2, 16, 32),)),
        "dlrm": (
            DLRM(),
            (
                torch.randn(8, 13),
                torch.randint(0, 1000, (4, 24)),
                torch.arange(0, 24, 3).repeat(4, 1),
            ),
        ),
        "vit": (ViT(), (torch.randn(2, 3, 32, 32),)),
        "whisper": (
            Whisper(),
            (torch.randn(1, 20, 32), torch.randint(0, 100, (1, 1)), torch.tensor([3])),
        ),
    }
