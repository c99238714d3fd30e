"""Citations follow the components in use: a class names its sources by `cites`, this file has the entries."""

from __future__ import annotations

from collections.abc import Sequence

BY_CLASS: dict[str, tuple[str, ...]] = {
    "Laplace": ("mackay1992", "khan2019", "immer2021", "daxberger2021"),
    "Ensemble": ("lakshminarayanan2017",),
    "MCDropout": ("gal2016", "srivastava2014"),
    "ConcreteDropout": ("gal2017",),
    "SWAG": ("maddox2019", "wilson2020"),
    "Evidence": ("mackay1992", "immer2021evidence"),
    "LeNet": ("lecun1998",),
    "ResNet20": ("he2016",),
    "Joint": ("osband2022",),
    "Dyadic": ("osband2022",),
    "MNIST": ("lecun1998",),
    "CIFAR10": ("krizhevsky2009",),
    "UCIRegression": ("hernandezlobato2015", "foong2019"),
}

ENTRIES: dict[str, str] = {
    "mackay1992": """@article{mackay1992,
  author = {MacKay, David J. C.}, title = {A practical {B}ayesian framework for backpropagation networks},
  journal = {Neural Computation}, volume = {4}, number = {3}, pages = {448--472}, year = {1992}}""",
    "khan2019": """@inproceedings{khan2019,
  author = {Khan, Mohammad Emtiyaz and Immer, Alexander and Abedi, Ehsan and Korzepa, Maciej},
  title = {Approximate inference turns deep networks into {G}aussian processes}, booktitle = {NeurIPS}, year = {2019}}""",
    "immer2021": """@inproceedings{immer2021,
  author = {Immer, Alexander and Korzepa, Maciej and Bauer, Matthias},
  title = {Improving predictions of {B}ayesian neural nets via local linearization}, booktitle = {AISTATS}, year = {2021}}""",
    "immer2021evidence": """@inproceedings{immer2021evidence,
  author = {Immer, Alexander and Bauer, Matthias and Fortuin, Vincent and R{\\"a}tsch, Gunnar and Khan, Mohammad Emtiyaz},
  title = {Scalable marginal likelihood estimation for model selection in deep learning}, booktitle = {ICML}, year = {2021}}""",
    "daxberger2021": """@inproceedings{daxberger2021,
  author = {Daxberger, Erik and Kristiadi, Agustinus and Immer, Alexander and Eschenhagen, Runa and Bauer, Matthias and Hennig, Philipp},
  title = {{L}aplace redux: effortless {B}ayesian deep learning}, booktitle = {NeurIPS}, year = {2021}}""",
    "lakshminarayanan2017": """@inproceedings{lakshminarayanan2017,
  author = {Lakshminarayanan, Balaji and Pritzel, Alexander and Blundell, Charles},
  title = {Simple and scalable predictive uncertainty estimation using deep ensembles}, booktitle = {NeurIPS}, year = {2017}}""",
    "gal2016": """@inproceedings{gal2016,
  author = {Gal, Yarin and Ghahramani, Zoubin},
  title = {Dropout as a {B}ayesian approximation: representing model uncertainty in deep learning}, booktitle = {ICML}, year = {2016}}""",
    "gal2017": """@inproceedings{gal2017,
  author = {Gal, Yarin and Hron, Jiri and Kendall, Alex}, title = {Concrete dropout}, booktitle = {NeurIPS}, year = {2017}}""",
    "maddox2019": """@inproceedings{maddox2019,
  author = {Maddox, Wesley J. and Izmailov, Pavel and Garipov, Timur and Vetrov, Dmitry P. and Wilson, Andrew Gordon},
  title = {A simple baseline for {B}ayesian uncertainty in deep learning}, booktitle = {NeurIPS}, year = {2019}}""",
    "wilson2020": """@inproceedings{wilson2020,
  author = {Wilson, Andrew Gordon and Izmailov, Pavel},
  title = {{B}ayesian deep learning and a probabilistic perspective of generalization}, booktitle = {NeurIPS}, year = {2020}}""",
    "srivastava2014": """@article{srivastava2014,
  author = {Srivastava, Nitish and Hinton, Geoffrey and Krizhevsky, Alex and Sutskever, Ilya and Salakhutdinov, Ruslan},
  title = {Dropout: a simple way to prevent neural networks from overfitting},
  journal = {Journal of Machine Learning Research}, volume = {15}, pages = {1929--1958}, year = {2014}}""",
    "lecun1998": """@article{lecun1998,
  author = {LeCun, Yann and Bottou, L{\\'e}on and Bengio, Yoshua and Haffner, Patrick},
  title = {Gradient-based learning applied to document recognition},
  journal = {Proceedings of the IEEE}, volume = {86}, number = {11}, pages = {2278--2324}, year = {1998}}""",
    "he2016": """@inproceedings{he2016,
  author = {He, Kaiming and Zhang, Xiangyu and Ren, Shaoqing and Sun, Jian},
  title = {Deep residual learning for image recognition}, booktitle = {CVPR}, year = {2016}}""",
    "osband2022": """@inproceedings{osband2022,
  author = {Osband, Ian and Wen, Zheng and Asghari, Seyed Mohammad and Dwaracherla, Vikranth and Lu, Xiuyuan and Van Roy, Benjamin},
  title = {Evaluating high-order predictive distributions in deep learning}, booktitle = {UAI}, year = {2022}}""",
    "devries2017": """@article{devries2017,
  author = {DeVries, Terrance and Taylor, Graham W.},
  title = {Improved regularization of convolutional neural networks with cutout}, journal = {arXiv:1708.04552}, year = {2017}}""",
    "krizhevsky2009": """@techreport{krizhevsky2009,
  author = {Krizhevsky, Alex}, title = {Learning multiple layers of features from tiny images},
  institution = {University of Toronto}, year = {2009}}""",
    "hernandezlobato2015": """@inproceedings{hernandezlobato2015,
  author = {Hern{\\'a}ndez-Lobato, Jos{\\'e} Miguel and Adams, Ryan P.},
  title = {Probabilistic backpropagation for scalable learning of {B}ayesian neural networks}, booktitle = {ICML}, year = {2015}}""",
    "foong2019": """@article{foong2019,
  author = {Foong, Andrew Y. K. and Li, Yingzhen and Hern{\\'a}ndez-Lobato, Jos{\\'e} Miguel and Turner, Richard E.},
  title = {`{I}n-between' uncertainty in {B}ayesian neural networks}, journal = {arXiv:1906.11537}, year = {2019}}""",
}


def bibliography(components: Sequence[object]) -> str:
    """BibTeX of the sources of the components in use, each once."""
    keys: dict[str, None] = {}
    for component in components:
        named = getattr(component, "cites", None) or BY_CLASS.get(type(component).__name__, ())
        keys |= dict.fromkeys(named)
    return "\n\n".join(ENTRIES.get(key, key) for key in keys) + "\n"
