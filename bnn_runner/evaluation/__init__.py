"""From a posterior to an `Evaluation`: log-likelihoods of every draw, closed forms, temperature scaling, storage."""
