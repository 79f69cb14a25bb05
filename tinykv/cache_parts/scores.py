"""How important each token has been so far, for a method that `uses_scores`: what `Method.score` gives, summed over all
queries. Only tokens in full precision have a sum, so there are two parts, as of the rows."""
import torch


class Scores:
    """The part of `CachedRows` that stays empty where a method does not score."""

    def __init__(self):
        self.recent_scores = None  # (B, Hkv, r)
        self.kept_scores = None  # (B, Hkv, p)

    def add_scores(self, scores):
        """Add scores (B, Hkv, S) of all tokens."""
        kept = None
        if self.kept_positions is not None:
            index = self.kept_positions.long().expand(*scores.shape[:2], -1)  # (B, Hkv, p)
            kept = scores.gather(2, index)  # (B, Hkv, p)
        self.accumulate(scores[:, :, self.n_coded:], kept)

    def accumulate(self, recent, kept):
        """Add scores of the recent tokens (B, Hkv, r) and of the kept ones (B, Hkv, p), or None."""
        if self.recent_scores is not None:
            # tokens that came since the last scores start at 0
            new_tokens = recent.shape[-1] - self.recent_scores.shape[-1]
            recent = torch.nn.functional.pad(self.recent_scores, (0, new_tokens)) + recent
        self.recent_scores = recent.clone()  # keys and values may have the same scores
        if kept is not None:
            self.kept_scores = self.kept_scores + kept

    def keep_scores(self, place):
        """Tokens are kept from now on. place (B, Hkv, p): where they are among the recent and the kept ones."""
        if self.recent_scores is not None:
            scores = self.recent_scores  # (B, Hkv, r)
            if self.kept_scores is not None:
                scores = torch.cat([scores, self.kept_scores], dim=2)  # (B, Hkv, r + n)
            self.kept_scores = scores.gather(2, place)  # (B, Hkv, p)

    def drop_scores(self, n):
        """The n oldest recent tokens are quantized."""
        if self.recent_scores is not None:
            self.recent_scores = self.recent_scores[:, :, n:].clone()

    def forget_scores(self):
        """The tokens to keep are chosen for good."""
        self.recent_scores = self.kept_scores = None
