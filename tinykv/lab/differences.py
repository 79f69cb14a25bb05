"""Differences between methods, paired: all read the same windows, so what windows share cancels out.

Losses are a list of draws of the calibration, each a list of windows.
"""
import math

import torch

from tinykv import UserError


def standard_error(D):
    """The standard error of the mean of D (C, W): C draws of the calibration, W windows. Both are samples of what might
    have been drawn (crossed random effects). With MS for mean squares,

        SE^2 = (MS_draws + MS_windows - MS_rest) / (C W)

    (MS_draws - MS_rest) / (C W) is what draws add to the variance of the mean, (MS_windows - MS_rest) / (C W) what
    windows add, and neither is below zero. With one draw only windows vary: SE is that of a mean over windows. None for
    one window, which has no spread.

    Returns SE and its degrees of freedom: few where draws, of which there are few, vary most. They are Satterthwaite's,
    SE^4 / sum(MS^2 / df), with one change: the sum is always over all three MS. By the textbook, an MS that was clipped
    away above leaves the sum as well. Here it stays, since a part that was estimated as zero is not known to be zero.
    So there are fewer degrees of freedom, down to 1, and p is larger, never smaller.
    """
    C, W = D.shape
    if W == 1:
        return None, None
    mean = D.mean()
    of_draws = D.mean(1, keepdim=True) - mean  # (C, 1)
    of_windows = D.mean(0, keepdim=True) - mean  # (1, W)
    rest = D - mean - of_draws - of_windows  # (C, W)
    # sums of squares over their degrees of freedom; one draw has none, and its sums are zero
    df_draws, df_windows = max(1, C - 1), W - 1
    ms_draws = W * of_draws.square().sum() / df_draws
    ms_windows = C * of_windows.square().sum() / df_windows
    ms_rest = rest.square().sum() / (df_draws * df_windows)
    total = max(ms_draws, ms_rest) + max(ms_windows, ms_rest) - ms_rest
    spread = ms_draws ** 2 / df_draws + ms_windows ** 2 / df_windows + ms_rest ** 2 / (df_draws * df_windows)
    df = max(1.0, total ** 2 / spread) if spread > 0 else df_windows
    return math.sqrt(total / (C * W)), float(df)


def p_value(t, df):
    """How often a t of `df` degrees of freedom is as far from 0 as this one, on either side, by chance.

    With t = sqrt(df) tan(a), the angle a has the density cos(a)^(df - 1) between -90 and 90 degrees, up to a factor.
    """
    angle = torch.linspace(math.atan(abs(t) / math.sqrt(df)), math.pi / 2, 10001, dtype=torch.float64)
    tail = torch.trapezoid(angle.cos() ** (df - 1), angle).item()
    half = math.exp(math.lgamma(df / 2) - math.lgamma((df + 1) / 2)) * math.sqrt(math.pi) / 2  # from 0 to 90 degrees
    return tail / half


def delta_error(nll, exact):
    """The standard error of the difference of two perplexities. nll, exact: losses of a method and of fp16.

    To first order, a window contributes ppl * nll - (ppl of fp16) * (nll of fp16) to the difference.
    """
    nll, exact = (torch.tensor(losses, dtype=torch.float64) for losses in (nll, exact))  # (C, W) both
    return standard_error(nll.mean().exp() * nll - exact.mean().exp() * exact)[0]


def paired(nll, other):
    """Losses of one row and of another -> (mean difference in nats a token, its standard error, t, p, how many losses
    of the first are lower). Error, t and p are None for one window. UserError for what is not in pairs, or finite."""
    nll, other = (torch.tensor(losses, dtype=torch.float64) for losses in (nll, other))  # (C, W) both
    if nll.shape != other.shape or not (nll - other).isfinite().all():
        raise UserError(f"losses of {tuple(nll.shape)} and {tuple(other.shape)} draws and windows are no pairs of "
                        "finite numbers; measure both on the same windows")
    D = nll - other  # (C, W)
    difference, (error, df) = D.mean().item(), standard_error(D)
    t = p = None
    if error is not None:
        t = difference / error if error > 0 else math.copysign(math.inf, difference) if difference else 0.0
        p = p_value(t, df)
    return difference, error, t, p, (D < 0).sum().item()
